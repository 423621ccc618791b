"""HSTU with learned biases by relative position and time: equal to a padded HSTU with dense biases,
and to itself with cached histories."""

import copy
import dataclasses
import pickle

import accuracy
import pytest
import torch
from marks import raising, slow_after
from torch import nn

import jagged_modules as jm

from .graph_cases import compiled, random_offsets
from .hstu_cases import (
    CONFIGS,
    HEADS,
    HISTORY,
    LENGTHS,
    TARGETS,
    WIDTH,
    PaddedHSTU,
    config_of,
    converted,
    double_stack,
    history_values,
)

LONGEST, BUCKETS = max(LENGTHS), 20
POSITION, TIME = dict(relative_position=LONGEST), dict(relative_time=BUCKETS)
BIASED = {
    "position": config_of(**POSITION),
    "time": config_of(**TIME),
    "both": config_of(**POSITION, **TIME),
    **{
        name: dataclasses.replace(CONFIGS[name], **POSITION, **TIME)
        for name in ("short", "context", "context-short", "groups", "all")
    },
}
every_config = pytest.mark.parametrize("config", BIASED.values(), ids=BIASED)
IS_TARGET = torch.cat([torch.arange(h + t) >= h for h, t in zip(HISTORY, TARGETS)])


def times_of(rows, config=None):
    """Timestamps in no order, of any size, or None if the config has no bias by time."""
    if config is not None and not config.relative_time:
        return None
    return (10 ** (7 * torch.rand(rows))).long() * torch.randint(-1, 2, (rows,))


def moved(times, lengths):
    """The timestamps of the next rows of the segments, and of the last row of each its own."""
    return torch.cat([torch.cat([x[1:], x[-1:]]) for x in times.split(lengths)])


def pick(times, rows):
    return None if times is None else times[rows]


# -- equal to --------------------------------------------------------------------------------------


def both_networks(config, dtype, asked, offsets_of):
    """Functions of the input and all parameters: a stack, and the padded network. The tensors by
    name, those of a padded network."""
    padded, stack = PaddedHSTU(2, config).to(dtype), jm.HSTUStack(WIDTH, HEADS, 2, config).to(dtype)
    names, parameters = zip(*padded.named_parameters())
    assert (
        converted(dict(padded.named_parameters())).keys() == dict(stack.named_parameters()).keys()
    )
    offsets, num_targets = offsets_of(LENGTHS), torch.tensor(TARGETS)
    times = dict(
        timestamps=times_of(sum(LENGTHS), config),
        query_timestamps=times_of(sum(LENGTHS), config) if asked else None,
    )

    def ours(values, *parameters):
        state = converted(dict(zip(names, parameters, strict=True)))
        return torch.func.functional_call(stack, state, ((values, offsets), num_targets), times)[0]

    def theirs(values, *parameters):
        return torch.func.functional_call(
            padded, dict(zip(names, parameters, strict=True)), (values, LENGTHS, TARGETS), times
        )

    return (
        ours,
        theirs,
        dict(zip(("x", *names), (torch.randn(sum(LENGTHS), WIDTH, dtype=dtype), *parameters))),
    )


@every_config
@pytest.mark.parametrize("asked", [False, True], ids=["default", "query_timestamps"])
def test_equals_the_padded_network(config, asked, offsets_of):
    """Outputs and the gradients of the input and of every parameter, the tables included."""
    *networks, tensors = both_networks(config, torch.float64, asked, offsets_of)
    results = []
    for network in networks:
        leaves = [x.detach().clone().requires_grad_() for x in tensors.values()]
        out = network(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    torch.testing.assert_close(*results)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, dtype",
    [  # the dtypes take turns; the sum of both tables, and all options, have both
        *((name, (torch.float32, torch.bfloat16)[i % 2]) for i, name in enumerate(BIASED)),
        ("both", torch.bfloat16),
        ("all", torch.float32),
    ],
    ids=str,
)
def test_rounds_as_little_as_the_padded_network(name, dtype, offsets_of):
    ours, theirs, tensors = both_networks(BIASED[name], dtype, False, offsets_of)
    accuracy.check(ours, lambda *x: accuracy.definition(theirs, tensors, x[-1]), tensors)


def test_tables_of_zeros_change_nothing(offsets_of):
    stack, plain = double_stack(BIASED["both"]), double_stack(CONFIGS["plain"])
    for layer in stack.layers:
        nn.init.zeros_(layer.position_bias), nn.init.zeros_(layer.time_bias)
    plain.load_state_dict(stack.state_dict(), strict=False)
    x = history_values(), offsets_of(LENGTHS)
    torch.testing.assert_close(stack(x, timestamps=times_of(len(x[0])))[0], plain(x)[0])


# -- cached histories ------------------------------------------------------------------------------


@every_config
@slow_after(1, "offsets_dtype", [torch.int32, torch.int64])
def test_cached_histories(config, offsets_dtype, offsets_of):
    """With every row's query timestamp given, and targets with theirs by default: histories and
    targets of many lengths."""
    values, stack, times = history_values(), double_stack(config), times_of(sum(LENGTHS), config)
    asked = times_of(sum(LENGTHS), config)
    history, targets = offsets_of(HISTORY, offsets_dtype), offsets_of(TARGETS, offsets_dtype)
    for of_targets in ("given", "default"):
        if asked is not None and of_targets == "default":
            asked[IS_TARGET] = moved(times[IS_TARGET], TARGETS)
        out, _ = stack(
            (values, offsets_of(LENGTHS)),
            torch.tensor(TARGETS),
            timestamps=times,
            query_timestamps=asked,
        )
        cache = stack.cache(
            (values[~IS_TARGET], history), pick(times, ~IS_TARGET), pick(asked, ~IS_TARGET)
        )
        of_score = pick(asked, IS_TARGET) if of_targets == "given" else None
        scores, _ = stack.score(
            (values[IS_TARGET], targets),
            cache,
            timestamps=pick(times, IS_TARGET),
            query_timestamps=of_score,
        )
        torch.testing.assert_close(scores, out[IS_TARGET])


def test_a_cache_of_defaults_is_given_the_request_time(offsets_of):
    """forward's default: the last row of a history has the time of the first target. A cache's: its
    own."""
    values, stack, times = history_values(), double_stack(BIASED["both"]), times_of(sum(LENGTHS))
    out, _ = stack((values, offsets_of(LENGTHS)), torch.tensor(TARGETS), timestamps=times)
    request, of_history = moved(times, LENGTHS)[~IS_TARGET], times[~IS_TARGET]
    history = (values[~IS_TARGET], offsets_of(HISTORY))
    targets = (values[IS_TARGET], offsets_of(TARGETS))
    scores, _ = stack.score(
        targets, stack.cache(history, of_history, request), timestamps=times[IS_TARGET]
    )
    torch.testing.assert_close(scores, out[IS_TARGET])
    caches = [
        stack.cache(history, of_history),
        stack.cache(history, of_history, moved(of_history, HISTORY)),
    ]
    default, explicit = (
        stack.score(targets, cache, timestamps=times[IS_TARGET])[0] for cache in caches
    )
    assert torch.equal(default, explicit) and not torch.allclose(default, scores)


@pytest.mark.parametrize("name", ["both", "context-short"])
def test_a_cache_keeps_the_timestamps_of_its_rows(name, offsets_of):
    stack, times = double_stack(BIASED[name]), times_of(sum(LENGTHS))
    values, offsets = history_values(), offsets_of(LENGTHS)
    cache = stack.cache((values, offsets), times)
    kept = [LENGTHS, [0 if n < 3 else n if n <= 4 else 2 for n in LENGTHS]][name != "both"]
    expected = torch.cat([x[len(x) - n :] for x, n in zip(times.split(LENGTHS), kept)])
    assert torch.equal(cache.timestamps, expected) and len(cache.layers[0].values) == sum(kept)
    times += 1
    assert torch.equal(cache.timestamps, expected), "a copy"


def test_a_layer_finds_the_query_timestamps_of_targets_itself(offsets_of):
    stack, times = double_stack(BIASED["both"]), times_of(20)
    history = (history_values(), offsets_of(LENGTHS))
    targets = (torch.randn(20, WIDTH, dtype=torch.float64), offsets_of([2] * 10))
    stack = jm.HSTUStack(WIDTH, HEADS, 1, BIASED["both"]).double()
    config = dataclasses.replace(stack.config, relative_position=LONGEST + 2)
    stack = jm.HSTUStack(WIDTH, HEADS, 1, config).double()
    cache = stack.cache(history, times_of(sum(LENGTHS)))
    alone, _ = stack.layers[0].score(
        targets, cache.layers[0], timestamps=times, cache_timestamps=cache.timestamps
    )
    assert torch.equal(alone, stack.score(targets, cache, timestamps=times)[0])


# -- parameters, devices, dtypes -------------------------------------------------------------------


def test_initialisation():
    layer = jm.HSTULayer(WIDTH, HEADS, config_of(relative_position=2000, relative_time=128))
    assert layer.position_bias.shape == (3999,) and layer.time_bias.shape == (129,)
    for table in (layer.position_bias, layer.time_bias):
        assert 0.8 < table.std() / 0.02 < 1.2 and abs(table.mean()) < 0.006
    assert torch.equal(layer.time_boundaries, jm.RelativeBias.log_boundaries(128))
    plain = jm.HSTULayer(WIDTH, HEADS, config_of())
    assert plain.position_bias is plain.time_bias is plain.time_boundaries is None
    assert not {"position_bias", "time_bias", "time_boundaries"} & plain.state_dict().keys()


@pytest.mark.parametrize("by", ["reset_parameters", "load_state_dict"])
def test_meta_layers_are_materialised(by, offsets_of):
    stack, expected = (
        jm.HSTUStack(WIDTH, HEADS, 2, BIASED["both"], device=device) for device in ("meta", None)
    )
    assert all(x.is_meta for x in stack.state_dict().values())
    stack.to_empty(device="cpu")
    for x in stack.state_dict().values():
        x.fill_(-1)
    if by == "load_state_dict":
        stack.load_state_dict(expected.state_dict())
    else:
        for module in (stack, expected):
            torch.manual_seed(5)
            module.reset_parameters()
    assert all(
        torch.equal(x, expected.state_dict()[name]) for name, x in stack.state_dict().items()
    )


@pytest.mark.parametrize(
    "clone",
    [copy.deepcopy, lambda stack: pickle.loads(pickle.dumps(stack))],
    ids=["deepcopy", "pickle"],
)
def test_copies(clone, offsets_of):
    stack, times = jm.HSTUStack(WIDTH, HEADS, 2, BIASED["both"]), times_of(5)
    x = torch.randn(5, WIDTH), offsets_of([2, 3])
    assert torch.equal(clone(stack)(x, timestamps=times)[0], stack(x, timestamps=times)[0])


@pytest.mark.parametrize("name", ["position", "time", "both"])
def test_every_parameter_gets_a_gradient_under_autocast_too(name, offsets_of):
    stack = jm.HSTUStack(WIDTH, HEADS, 2, BIASED[name])
    x, times = (torch.randn(5, WIDTH), offsets_of([2, 3])), times_of(5, stack.config)
    expected, _ = stack(x, timestamps=times)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, _ = stack(x, timestamps=times)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() <= 8 * torch.finfo(
        torch.bfloat16
    ).eps * expected.abs().max()
    out.sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in stack.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes(dtype, offsets_of):
    layer = jm.HSTULayer(WIDTH, HEADS, BIASED["both"]).to(dtype)
    assert (
        layer.position_bias.dtype == layer.time_bias.dtype == dtype
        and layer.time_boundaries.dtype == torch.int64
    )
    out, _ = layer((torch.randn(5, WIDTH, dtype=dtype), offsets_of([2, 3])), timestamps=times_of(5))
    out.sum().backward()
    assert out.dtype == layer.time_bias.grad.dtype == dtype


def test_shapes_on_the_meta_device_and_without_rows(offsets_of):
    config = BIASED["groups"]
    stack = jm.HSTUStack(WIDTH, HEADS, 2, config, device="meta")
    x = (torch.empty(11, WIDTH, device="meta"), torch.empty(4, dtype=torch.int64, device="meta"))
    times = times_of(11).to("meta")
    assert stack(x, timestamps=times)[0].shape == (11, WIDTH)
    assert stack.score(x, stack.cache(x, times), timestamps=times)[0].shape == (11, WIDTH)
    stack, none = jm.HSTUStack(WIDTH, HEADS, 2, config), torch.zeros(0, dtype=torch.int64)
    for lengths in ([], [0, 0]):
        x = torch.randn(0, WIDTH), offsets_of(lengths)
        assert (
            stack(x, timestamps=none)[0].shape
            == stack.score(x, stack.cache(x, none), timestamps=none)[0].shape
            == (0, WIDTH)
        )


def test_timestamps_of_a_keyed_jagged_tensor(offsets_of):
    """Another feature's values, or int64 weights."""
    torchrec = pytest.importorskip("torchrec")
    layer = jm.HSTULayer(WIDTH, HEADS, BIASED["both"])
    times = times_of(5)
    values = torch.randn(5, WIDTH)
    offsets = offsets_of([2, 3])
    features = torchrec.KeyedJaggedTensor(["time"], times, offsets=offsets, weights=times)
    out = layer(
        torchrec.JaggedTensor(values, offsets=offsets), timestamps=features["time"].weights()
    )
    assert torch.equal(
        out.values(), layer((values, offsets), timestamps=features["time"].values())[0]
    )


# -- graph tools -----------------------------------------------------------------------------------

SIZES = [(5, 41, 11), (6, 83, 23), (13, 140, 15)]  # segments, rows, targets


def test_compiles_once():
    stack = jm.HSTUStack(WIDTH, HEADS, 1, config_of(relative_position=200, relative_time=BUCKETS))
    graph, counter = compiled(stack, floats_as_inputs=True)
    compilations = []
    for segments, rows, _ in SIZES:
        offsets = random_offsets(segments, rows)
        times = times_of(rows)
        values = torch.randn(rows, WIDTH)
        results = []
        for call in (stack, graph):
            out, _ = call((values, offsets), timestamps=times)
            results.append(
                [out, *torch.autograd.grad(out.square().sum(), list(stack.parameters()))]
            )
        torch.testing.assert_close(*results)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


def test_scoring_compiles_once():
    stack = jm.HSTUStack(WIDTH, HEADS, 1, config_of(relative_position=200, relative_time=BUCKETS))
    graph, counter = compiled(stack.score)
    compilations = []
    for segments, rows, count in SIZES:
        cache = stack.cache(
            (torch.randn(rows, WIDTH), random_offsets(segments, rows)), times_of(rows)
        )
        targets = (torch.randn(count, WIDTH), random_offsets(segments, count))
        times = times_of(count)
        expected = stack.score(targets, cache, timestamps=times)[0]
        torch.testing.assert_close(graph(targets, cache, timestamps=times)[0], expected)
        compilations.append(counter.frame_count)
    assert len(set(compilations)) == 1


# -- bad input -------------------------------------------------------------------------------------

X, TIMES = (torch.randn(5, WIDTH), torch.tensor([0, 2, 5])), torch.arange(5)
BAD_FORWARDS = [
    *raising(
        ValueError,
        {
            "^timestamps must be given with config.relative_time, got None": (TIME, {}),
            "^timestamps must be None without config.relative_time, got a Tensor": (
                POSITION,
                dict(timestamps=TIMES),
            ),
            "^timestamps must be int64, got torch.int32": (TIME, dict(timestamps=TIMES.int())),
            r"^timestamps must be 1-D, got shape \[1, 5\]": (TIME, dict(timestamps=TIMES[None])),
            "^timestamps must have one element for each row of x, 5, got 4": (
                TIME,
                dict(timestamps=TIMES[:4]),
            ),
            "^timestamps must be on the device of x's values, cpu, got meta": (
                TIME,
                dict(timestamps=TIMES.to("meta")),
            ),
            "^query_timestamps must have one element for each row of x": (
                TIME,
                dict(timestamps=TIMES, query_timestamps=TIMES[:4]),
            ),
            "^x has a segment of 3 rows, more than config.relative_position, 2$": (
                dict(relative_position=2),
                {},
            ),
        },
    ),
    *raising(
        TypeError,
        {
            "^timestamps must be int64, got torch.float32": (TIME, dict(timestamps=TIMES.float())),
            "^timestamps must be a torch.Tensor, got list": (TIME, dict(timestamps=[1, 2])),
        },
    ),
    (
        TIME,
        dict(query_timestamps=TIMES),
        ValueError,
        "^timestamps must be given with config.relative_time, got None",
    ),
    (
        POSITION,
        dict(query_timestamps=TIMES),
        ValueError,
        "^query_timestamps must be None without config.relative_time, got a Tensor",
    ),
]


@pytest.mark.parametrize("kind", [jm.HSTULayer, jm.HSTUStack])
@pytest.mark.parametrize(
    "fields, options, error, message",
    BAD_FORWARDS,
    ids=[message[1:60] for *_, message in BAD_FORWARDS],
)
def test_bad_forward(kind, fields, options, error, message):
    module = kind(WIDTH, HEADS, *([2] if kind is jm.HSTUStack else []), config_of(**fields))
    with pytest.raises(error, match=message):
        module(X, **options)


@pytest.mark.parametrize("name", ["relative_position", "relative_time"])
def test_bad_config(name):
    with pytest.raises(ValueError, match=f"^{name} must be at least 0, got -1"):
        jm.HSTUConfig(**{name: -1})
    with pytest.raises(TypeError, match=f"^{name} must be an int, got bool"):
        jm.HSTUConfig(**{name: True})


def test_bad_caches():
    gap = jm.HSTUStack(
        WIDTH, HEADS, 1, config_of(relative_position=5, global_prefix=1, recent_history=2)
    )
    stack, timeless = (
        jm.HSTUStack(WIDTH, HEADS, 2, config_of(relative_position=5, **fields))
        for fields in (TIME, {})
    )
    cache, one = stack.cache(X, TIMES), (X[0][:2], torch.tensor([0, 1, 2]))
    for call, message in {
        lambda: stack.cache(X): "^timestamps must be given with config.relative_time",
        lambda: stack.cache(
            X, TIMES[:3]
        ): "^timestamps must have one element for each row of history, 5, got 3",
        lambda: stack.score(one, cache): "^timestamps must be given with config.relative_time",
        lambda: stack.score(
            one, cache, timestamps=TIMES
        ): "^timestamps must have one element for each row of targets, 2, got 5",
        lambda: stack.score(
            one, jm.HistoryCache(cache.layers), timestamps=TIMES[:2]
        ): "^cache's timestamps must be given",
        lambda: stack.score(
            X, cache, timestamps=TIMES
        ): "^targets and cache have a segment of 6 rows, more than config.relative_position, 5$",
        lambda: stack.layers[0].score(
            one, cache.layers[0], timestamps=TIMES[:2]
        ): "^cache_timestamps must be given",
        lambda: timeless.score(
            one, timeless.cache(X), timestamps=TIMES[:2]
        ): "^timestamps must be None without config.relative_time",
        lambda: gap.cache(X): "^config.global_prefix must be 0 to cache with relative_position",
        lambda: timeless.cache(
            (torch.zeros(6, WIDTH), torch.tensor([0, 6]))
        ): "^history has a segment of 6 rows, more than",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
