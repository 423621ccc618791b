"""HSTULayer and HSTUStack: equal to a padded HSTU with dense masks, and to themselves with cached
histories."""

import copy
import pickle

import accuracy
import pytest
import torch
from marks import slow_after
from torch import nn
from torch.nn import functional as nnf

import jagged_modules as jm
from jagged_modules.layers import hstu

from .hstu_cases import (
    CONFIGS,
    HEADS,
    HISTORY,
    LAYERS,
    LENGTHS,
    TARGETS,
    WIDTH,
    PaddedHSTU,
    config_of,
    converted,
    double_stack,
    every_config,
    history_values,
)


@slow_after(
    len(CONFIGS),
    "name, dtype",
    [
        *((name, torch.float64) for name in CONFIGS),
        *((name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(CONFIGS)),
        *((name, torch.bfloat16) for name in ("plain", "all")),
    ],
    ids=str,
)
def test_equals_the_padded_network(name, dtype, offsets_of):
    """Outputs and the gradients of the input and of every parameter, weights converted from the
    padded network."""
    config = CONFIGS[name]
    padded, stack = PaddedHSTU(2, config).to(dtype), jm.HSTUStack(WIDTH, HEADS, 2, config).to(dtype)
    names, parameters = zip(*padded.named_parameters())
    assert converted(dict(padded.named_parameters())).keys() == stack.state_dict().keys()
    offsets, num_targets = offsets_of(LENGTHS), torch.tensor(TARGETS)

    def ours(values, *parameters):
        state = converted(dict(zip(names, parameters, strict=True)))
        return torch.func.functional_call(stack, state, ((values, offsets), num_targets))[0]

    def theirs(values, *parameters):
        return torch.func.functional_call(
            padded, dict(zip(names, parameters, strict=True)), (values, LENGTHS, TARGETS)
        )

    tensors = dict(zip(("x", *names), (torch.randn(sum(LENGTHS), WIDTH, dtype=dtype), *parameters)))
    accuracy.check(ours, lambda *x: accuracy.definition(theirs, tensors, x[-1]), tensors)


@every_config
def test_swapped_targets_swap_their_results(config, offsets_of):
    """With target groups, whole groups are swapped. No other row changes."""
    values = history_values()
    stack, group, offsets = double_stack(config), config.target_group_size, offsets_of(LENGTHS)
    order, end = torch.arange(len(values)), int(offsets[9])  # user 8 has 7 targets
    order[end - 7 : end - 7 + group], order[end - 7 + group : end - 7 + 2 * group] = (
        order[end - 7 + group : end - 7 + 2 * group].clone(),
        order[end - 7 : end - 7 + group].clone(),
    )
    before, _ = stack((values, offsets), torch.tensor(TARGETS))
    after, _ = stack((values[order], offsets), torch.tensor(TARGETS))
    torch.testing.assert_close(after, before[order])


@every_config
def test_other_segments_do_not_matter(config, offsets_of):
    values = history_values()
    stack = double_stack(config)
    together, _ = stack((values, offsets_of(LENGTHS)), torch.tensor(TARGETS))
    for rows, expected, t in zip(values.split(LENGTHS), together.split(LENGTHS), TARGETS):
        alone, _ = stack((rows, offsets_of([len(rows)])), torch.tensor([t]))
        torch.testing.assert_close(alone, expected)


def test_the_scaling_length_of_the_container(offsets_of):
    values = history_values()
    stack = double_stack(config_of(scaling_seqlen=None))
    fixed = double_stack(config_of(scaling_seqlen=30))
    fixed.load_state_dict(stack.state_dict())
    x = jm.Jagged(values, offsets_of(LENGTHS), max_seqlen=30)
    assert torch.equal(stack(x).values, fixed(x).values)
    empty = jm.Jagged(values[:0], offsets_of([0, 0]), max_seqlen=0)
    assert stack(empty).values.shape == (0, WIDTH)


def test_q_k_and_v_are_views_of_one_projection(offsets_of, monkeypatch):
    values = history_values()
    seen = []

    def attention(q, k, v, *args, **kwargs):
        seen.extend([q, k, v])
        return attend(q, k, v, *args, **kwargs)

    attend = hstu.attend
    monkeypatch.setattr(hstu, "attend", attention)
    jm.HSTULayer(WIDTH, HEADS, CONFIGS["dims"]).double()((values, offsets_of(LENGTHS)))
    assert len({x.untyped_storage().data_ptr() for x in seen}) == 1
    assert [x.stride(0) for x in seen] == [HEADS * 2 * (3 + 5)] * 3


# -- cached histories ------------------------------------------------------------------------------


@every_config
@slow_after(1, "offsets_dtype", [torch.int32, torch.int64])
def test_cached_histories(config, offsets_dtype, offsets_of):
    """Empty histories, users without targets, histories shorter and longer than context and
    max_attn_len."""
    values = history_values()
    stack = double_stack(config)
    is_target = torch.cat([torch.arange(h + t) >= h for h, t in zip(HISTORY, TARGETS)])
    out, _ = stack((values, offsets_of(LENGTHS, offsets_dtype)), torch.tensor(TARGETS))
    history, targets = offsets_of(HISTORY, offsets_dtype), offsets_of(TARGETS, offsets_dtype)
    scores, offsets = stack.score(
        (values[is_target], targets), stack.cache((values[~is_target], history))
    )
    torch.testing.assert_close(scores, out[is_target])
    assert offsets is targets


def test_caching_and_scoring_call_the_stack_and_its_layers(offsets_of):
    """So forward hooks see both, as they see a plain forward."""
    values = history_values()
    stack = double_stack(CONFIGS["all"])
    history = (values, offsets_of(LENGTHS))
    targets = (values[:10], offsets_of([1] * 10))
    seen = []
    for module, name in ((stack, "stack"), *((layer, i) for i, layer in enumerate(stack.layers))):
        module.register_forward_pre_hook(lambda *_, name=name: seen.append(("before", name)))
        module.register_forward_hook(lambda *_, name=name: seen.append(("after", name)))
    order = [
        ("before", "stack"),
        *((when, i) for i in range(LAYERS) for when in ("before", "after")),
        ("after", "stack"),
    ]
    stack(history)
    assert seen == order
    cache = stack.cache(history)
    assert seen == 2 * order
    stack.score(targets, cache)
    assert seen == 3 * order


def test_the_last_layer_of_a_cache_only_projects(offsets_of, monkeypatch):
    values = history_values()
    calls, attend = [], hstu.attend
    monkeypatch.setattr(
        hstu, "attend", lambda *args, **options: calls.append(args) or attend(*args, **options)
    )
    stack = double_stack(CONFIGS["plain"])
    stack.cache((values, offsets_of(LENGTHS)))
    assert len(calls) == len(stack.layers) - 1


def test_a_cache_serves_many_times(offsets_of):
    values = history_values()
    stack = double_stack(CONFIGS["plain"])
    cache = stack.cache((values, offsets_of(LENGTHS)))
    targets = torch.randn(20, WIDTH, dtype=torch.float64)
    together, _ = stack.score((targets, offsets_of([2] * 10)), cache)
    for first in (0, 1):
        alone, _ = stack.score((targets[first::2], offsets_of([1] * 10)), cache)
        torch.testing.assert_close(alone, together[first::2])


@pytest.mark.parametrize("context, rows", [(0, 2 + 0 + 2), (2, 3 + 0 + 2), (4, 5 + 0 + 2)])
def test_a_cache_holds_what_targets_see(context, rows, offsets_of):
    """Histories of 3 + context - 2, 0 and 9 rows, of which targets see 2 events back."""
    lengths = [max(context + 1, 3), 0, 9]
    stack = jm.HSTUStack(
        WIDTH,
        HEADS,
        2,
        config_of(contextual_seqlen=context, max_attn_len=2, head_dim=3, linear_dim=5),
    )
    cache = stack.cache((torch.randn(sum(lengths), WIDTH), offsets_of(lengths)))
    assert [layer.values.shape for layer in cache.layers] == [(rows, HEADS, 3 + 5)] * 2


@pytest.mark.parametrize(
    "fields, rows",
    [
        (dict(global_prefix=2), 3 + 0 + 1 + 9),
        (dict(recent_history=2), 2 + 0 + 1 + 2),
        (dict(recent_history=2, global_prefix=2), 3 + 0 + 1 + 4),
        (dict(recent_history=4, max_attn_len=3, global_prefix=1), 3 + 0 + 1 + 4),
        (dict(recent_history=4, max_attn_len=3, min_full_attn_seqlen=1), 3 + 0 + 1 + 4),
        # one row sees nothing but the prefix
        (dict(recent_history=9, global_prefix=1, contextual_seqlen=3), 3 + 0 + 1 + 9),
        (dict(recent_history=5, contextual_seqlen=3), 3 + 0 + 0 + 5),
    ],
)
def test_a_cache_holds_the_prefix_and_the_recent_history(fields, rows, offsets_of):
    """Histories of 3, 0, 1 and 9 rows. The rows are those that a target after the history sees."""
    lengths, config = [3, 0, 1, 9], config_of(**fields)
    kept = torch.cat([config.mask().keep(n + 1, n + 1, 1)[-1, :-1] for n in lengths])
    assert int(kept.sum()) == rows
    stack, values = jm.HSTUStack(WIDTH, HEADS, 2, config), torch.randn(sum(lengths), WIDTH)
    all_rows = jm.HSTUStack(WIDTH, HEADS, 2, config_of())
    all_rows.load_state_dict(stack.state_dict())
    cache = stack.cache((values, offsets_of(lengths)))
    whole = all_rows.cache((values, offsets_of(lengths)))
    torch.testing.assert_close(cache.layers[0].values, whole.layers[0].values[kept])
    counts = [int(part.sum()) for part in kept.split(lengths)]
    assert cache.layers[0].offsets.diff().tolist() == counts


def test_the_cache_of_a_jagged_keeps_its_scaling_length(offsets_of):
    values = history_values()
    stack, lengths = double_stack(config_of(scaling_seqlen=None)), offsets_of(LENGTHS)
    cache = stack.cache(jm.Jagged(values, lengths, max_seqlen=30))
    assert [layer.max_seqlen for layer in cache.layers] == [30] * LAYERS
    targets = torch.randn(10, WIDTH, dtype=torch.float64), offsets_of([1] * 10)
    both = torch.cat([y for pair in zip(values.split(LENGTHS), targets[0].split(1)) for y in pair])
    full = stack(
        jm.Jagged(both, offsets_of([n + 1 for n in LENGTHS]), max_seqlen=30),
        torch.ones(10, dtype=torch.int64),
    )
    torch.testing.assert_close(
        stack.score(targets, cache)[0], full.values[offsets_of([n + 1 for n in LENGTHS])[1:] - 1]
    )


def test_scoring_copies_no_history(offsets_of):
    """Nothing is allocated that is as large as a layer's keys."""
    length = 4000
    stack = jm.HSTUStack(32, 2, 2, config_of())
    with torch.no_grad():
        cache = stack.cache((torch.randn(length, 32), offsets_of([length])))
        targets = (torch.randn(3, 32), offsets_of([3]))
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        ) as profile:
            stack.score(targets, cache)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 0 < largest <= 4 * 2 * 3 * length, "the scores of both heads and all targets"


def test_layers_share_one_schedule(builds, offsets_of):
    """On the meta device, everything runs except the kernels' arithmetic, including the
    schedules."""
    config, num_targets = CONFIGS["context-short"], torch.tensor(TARGETS)
    stack = jm.HSTUStack(WIDTH, HEADS, LAYERS, config, device="meta")
    x = jm.Jagged(torch.randn(sum(LENGTHS), WIDTH), offsets_of(LENGTHS))
    x = x.prepare(num_heads=HEADS, head_dim=WIDTH // HEADS, mask=config.mask(num_targets)).to(
        "meta"
    )
    stack(x, num_targets)
    assert len(builds) == 1
    builds.clear()
    cache = stack.cache(x)
    targets = jm.Jagged(torch.randn(20, WIDTH), offsets_of([2] * 10)).to("meta")
    assert len(builds) == 1, "the mask without targets"
    for _ in range(2):
        stack.score(targets, cache)
    assert len(builds) == 3, "one for the targets and the cache, one for the targets themselves"


# -- containers, devices, dtypes -------------------------------------------------------------------


def test_containers(container, offsets_of):
    stack = jm.HSTUStack(WIDTH, HEADS, 2, config_of())
    values = torch.randn(11, WIDTH)
    target_values = torch.randn(6, WIDTH)
    num_targets = torch.tensor([1, 0, 2])
    x = container(values, offsets_of([4, 0, 7]))
    targets = container(target_values, offsets_of([2, 1, 3]))
    out, expected = stack(x, num_targets), stack((values, offsets_of([4, 0, 7])), num_targets)
    scores = stack.score(targets, stack.cache(x))
    expected_scores = stack.score(
        (target_values, offsets_of([2, 1, 3])), stack.cache((values, offsets_of([4, 0, 7])))
    )
    for result, (rows, offsets), given in ((out, expected, x), (scores, expected_scores, targets)):
        assert type(result) is type(given)
        assert torch.equal(jm.Jagged.wrap(result).values, rows)
        assert torch.equal(jm.Jagged.wrap(result).offsets, offsets)


def test_embedding_collection_outputs():
    torchrec = pytest.importorskip("torchrec")
    tables = [
        torchrec.EmbeddingConfig(
            name="table", embedding_dim=WIDTH, num_embeddings=50, feature_names=["events"]
        )
    ]
    collection = torchrec.EmbeddingCollection(tables=tables)
    ids = torchrec.KeyedJaggedTensor(
        ["events"], torch.randint(50, (7,)), lengths=torch.tensor([3, 0, 4], dtype=torch.int32)
    )
    out = jm.HSTULayer(WIDTH, HEADS, config_of())(
        collection(ids)["events"], torch.tensor([1, 0, 2])
    )
    assert isinstance(out, torchrec.JaggedTensor) and out.lengths().tolist() == [3, 0, 4]
    out.values().sum().backward()
    (weight,) = collection.parameters()
    assert weight.grad.abs().sum() > 0


def test_initialisation():
    layer = jm.HSTULayer(64, 4)
    for linear in (layer.uvqk_proj, layer.out_proj):
        bound = (6 / (linear.in_features + linear.out_features)) ** 0.5
        assert 0.9 * bound < linear.weight.abs().max() <= bound
    assert not layer.uvqk_proj.bias.any() and layer.out_proj.bias is None
    for norm in (layer.input_norm, layer.output_norm):
        assert (norm.weight == 1).all() and not norm.bias.any() and norm.eps == 1e-6


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))],
    ids=["deepcopy", "pickle"],
)
def test_a_copys_projection_resets_its_own_parameters(clone):
    layer = jm.HSTULayer(64, 4)
    copied, before = clone(layer), layer.uvqk_proj.weight.clone()
    copied.uvqk_proj.reset_parameters()
    assert type(copied.uvqk_proj) is nn.Linear, "as tools that replace Linears look for"
    assert torch.equal(layer.uvqk_proj.weight, before) and not torch.equal(
        copied.uvqk_proj.weight, before
    )


def test_the_input_norm_is_a_layer_norm_of_any_shape():
    norm, x = jm.HSTULayer(8, 2).input_norm, torch.randn(3, 5, 8)
    assert torch.equal(norm(x), nnf.layer_norm(x, [8], norm.weight, norm.bias, norm.eps))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_gradients_of_the_input_norm_in_16_bits_are_summed_in_fp32(dtype):
    rows, norm = 1000, jm.HSTULayer(8, 2).to(dtype).input_norm
    x = torch.randn(rows, 8, dtype=dtype)
    norm(x).backward(torch.ones(rows, 8, dtype=dtype))
    assert norm.weight.grad.dtype == dtype and (norm.bias.grad == rows).all()
    normal = nn.functional.layer_norm(x.double(), (8,), eps=norm.eps)
    torch.testing.assert_close(
        norm.weight.grad.double(), normal.sum(0), rtol=torch.finfo(dtype).eps, atol=1e-3
    )


@pytest.mark.parametrize("invariant", [False, True], ids=["default", "batch_invariant"])
def test_hooks_of_every_module_run(invariant, offsets_of):
    layer, seen = jm.HSTULayer(WIDTH, HEADS, CONFIGS["dims"]), []
    for name, module in layer.named_children():
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    with jm.batch_invariant(invariant):
        layer((history_values().float(), offsets_of(LENGTHS)))
    assert sorted(seen) == sorted(name for name, _ in layer.named_children())


def test_norms_may_stay_in_fp32(offsets_of):
    layer = jm.HSTULayer(WIDTH, HEADS, config_of()).bfloat16()
    layer.input_norm.float(), layer.output_norm.float()
    values, _ = layer((torch.randn(5, WIDTH, dtype=torch.bfloat16), offsets_of([2, 3])))
    assert values.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "fields",
    [dict(contextual_seqlen=2), dict(max_attn_len=3), dict(recent_history=3, global_prefix=1)],
    ids=str,
)
def test_caching_on_meta_needs_offsets_on_the_host(fields):
    """How many rows the cache has depends on their values."""
    stack = jm.HSTUStack(WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=9, **fields), device="meta")
    values, offsets = torch.empty(9, WIDTH, device="meta"), torch.tensor([0, 2, 9])
    with pytest.raises(
        ValueError, match="^history's offsets must be on the host if .*, got meta offsets"
    ):
        stack.cache((values, offsets.to("meta")))
    on_host = jm.HSTUStack(WIDTH, HEADS, 2, stack.config).cache((torch.zeros(9, WIDTH), offsets))
    cache = stack.cache((values, offsets))
    assert [x.values.shape for x in cache.layers] == [x.values.shape for x in on_host.layers]
    assert stack.score(
        (torch.empty(4, WIDTH, device="meta"), offsets[[0, 1, 1]].to("meta")), cache
    )[0].is_meta


def test_state_dict_round_trip(offsets_of):
    stack, other = (jm.HSTUStack(WIDTH, HEADS, 2, config_of()) for _ in range(2))
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert not torch.equal(stack(x)[0], other(x)[0])
    other.load_state_dict(stack.state_dict())
    assert torch.equal(stack(x)[0], other(x)[0])


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda stack: pickle.loads(pickle.dumps(stack))],
    ids=["deepcopy", "pickle"],
)
def test_copies(clone, offsets_of):
    stack = jm.HSTUStack(WIDTH, HEADS, 2, CONFIGS["all"])
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert torch.equal(clone(stack)(x)[0], stack(x)[0])


def test_meta_parameters_are_materialised_by_reset_parameters():
    stack = jm.HSTUStack(WIDTH, HEADS, 2, device="meta")
    assert all(x.is_meta for x in stack.parameters())
    stack.to_empty(device="cpu")
    for parameter in stack.parameters():
        nn.init.constant_(parameter, float("nan"))
    torch.manual_seed(5)
    stack.reset_parameters()
    torch.manual_seed(5)
    expected = jm.HSTUStack(WIDTH, HEADS, 2).state_dict()
    assert all(torch.equal(x, expected[name]) for name, x in stack.state_dict().items())


def test_shapes_on_the_meta_device():
    stack = jm.HSTUStack(WIDTH, HEADS, 2, CONFIGS["groups"], device="meta")
    x = torch.empty(11, WIDTH, device="meta"), torch.empty(4, dtype=torch.int64, device="meta")
    assert stack(x, torch.empty(3, dtype=torch.int64, device="meta"))[0].shape == (11, WIDTH)
    assert stack.score(x, stack.cache(x))[0].shape == (11, WIDTH)


def test_no_segments_and_no_rows(offsets_of):
    for config in CONFIGS.values():
        stack = jm.HSTUStack(WIDTH, HEADS, 2, config)
        for lengths in ([], [0, 0]):
            x = (torch.randn(0, WIDTH), offsets_of(lengths))
            num_targets = torch.zeros(len(lengths), dtype=torch.int64)
            assert (
                stack(x, num_targets)[0].shape
                == stack.score(x, stack.cache(x))[0].shape
                == (0, WIDTH)
            )


def test_autocast(offsets_of):
    stack = jm.HSTUStack(WIDTH, HEADS, 2, config_of())
    x = (torch.randn(5, WIDTH), offsets_of([2, 3]))
    targets = (torch.randn(3, WIDTH), offsets_of([1, 2]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (out, _), (scores, _) = stack(x), stack.score(targets, stack.cache(x))
    assert out.dtype == scores.dtype == torch.float32  # the residual stream keeps its dtype
    out.sum().backward()
    assert all(x.grad.dtype == torch.float32 for x in stack.parameters())
    for actual, (expected, _) in ((out, stack(x)), (scores, stack.score(targets, stack.cache(x)))):
        assert (actual - expected).abs().max() <= 8 * torch.finfo(
            torch.bfloat16
        ).eps * expected.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, offsets_of):
    assert (
        jm.HSTULayer(WIDTH, HEADS, config_of())
        .to(dtype)((torch.randn(5, WIDTH, dtype=dtype), offsets_of([2, 3])))[0]
        .dtype
        == dtype
    )


def test_dropout(offsets_of):
    layer = jm.HSTULayer(WIDTH, HEADS, config_of(dropout=0.5))
    plain = jm.HSTULayer(WIDTH, HEADS, config_of())
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert not torch.equal(layer(x)[0], layer(x)[0])
    assert torch.equal(layer.eval()(x)[0], plain(x)[0])


def test_training(offsets_of):
    """Whether the target occurs in the history: every parameter learns, and the loss falls to a
    tenth."""
    stack = jm.HSTUStack(16, HEADS, 2, config_of(contextual_seqlen=1))
    head = nn.Linear(16, 1)
    items = torch.randn(4, 16)
    ids, targets = torch.randint(4, (16, 3)), torch.randint(4, (16, 2))
    labels = (ids[:, None, 1:] == targets[:, :, None]).any(2).float().flatten()
    values, offsets = items[torch.cat([ids, targets], dim=1).flatten()], offsets_of([5] * 16)
    parameters = [*stack.parameters(), *head.parameters()]
    optimizer, losses = torch.optim.Adam(parameters, lr=0.01), []
    for _ in range(100):
        out, _ = stack((values, offsets), torch.full((16,), 2))
        losses.append(
            nnf.binary_cross_entropy_with_logits(
                head(out.unflatten(0, (16, 5))[:, 3:]).flatten(), labels
            )
        )
        optimizer.zero_grad()
        losses[-1].backward()
        assert all(x.grad.abs().sum() > 0 for x in parameters)
        optimizer.step()
    assert losses[-1] < 0.1 * losses[0]
