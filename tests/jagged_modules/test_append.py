"""Cached histories that grow: append, then score equals the full forward, for every layer with a
cache."""

from unittest.mock import Mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import jagged_modules as jm

from .caching import HSTU_CONFIGS, Timeline, hstu, jagged
from .hstu_cases import HEADS, WIDTH, config_of

# events of five users: the history, then two times new ones
PARTS = [[4, 0, 7, 1, 0], [1, 0, 0, 3, 2], [0, 0, 5, 1, 1]]
TARGETS = [2, 1, 4, 0, 3]
BUDGET = 2**20
CACHES = {"tensors": None, "pages": 3, "long-pages": 128}  # rows of a page


@pytest.fixture(params=CACHES.values(), ids=CACHES)
def page_rows(request):
    return request.param


@torch.no_grad()
def grow(layer, timeline, page_rows, timed=False):
    """The cache of all parts, and what append returned, part by part. Through a PagedHistoryCache,
    or HistoryCache.append."""
    users = list(range(len(timeline.targets)))
    if page_rows is not None:
        cache = jm.PagedHistoryCache(layer, BUDGET, page_rows)
        cache.put(users, jagged(timeline.take(timeline.rows, 0)), **timeline.times_of(0, timed))
        outputs = [
            cache.append(
                users, jagged(timeline.take(timeline.rows, i)), **timeline.times_of(i, timed)
            )
            for i in range(1, len(timeline.parts))
        ]
        return cache.select(users), outputs
    kv = layer.cache(jagged(timeline.take(timeline.rows, 0)), **timeline.times_of(0, timed))
    outputs = []
    for i in range(1, len(timeline.parts)):
        out, added = layer.append(
            jagged(timeline.take(timeline.rows, i)), kv, **timeline.times_of(i, timed)
        )
        outputs.append(out)
        kv = kv.append(added)
    return kv, outputs


@pytest.mark.parametrize("name", HSTU_CONFIGS)
def test_hstu(name, page_rows):
    """Targets and new events get the rows of the full forward."""
    config = HSTU_CONFIGS[name]
    timeline, stack, timed = Timeline(PARTS, TARGETS), hstu(config), config.relative_time > 0
    full = stack(jagged(timeline.rows), torch.tensor(TARGETS), **timeline.times_of(None, timed))
    expected = list(full.values.split(timeline.lengths))
    kv, outputs = grow(stack, timeline, page_rows, timed)
    scores = stack.score(
        jagged(timeline.take(timeline.rows, -1)), kv, **timeline.times_of(-1, timed)
    )
    torch.testing.assert_close(scores.values, torch.cat(timeline.take(expected, -1)))
    for i, out in enumerate(outputs):
        torch.testing.assert_close(out.values, torch.cat(timeline.take(expected, i + 1)))


def test_the_cached_rows_of_limited_attention(page_rows):
    """The last max_attn_len rows are kept, of long and of short histories."""
    timeline, stack = Timeline(PARTS, TARGETS), hstu(HSTU_CONFIGS["short"])
    kv, _ = grow(stack, timeline, page_rows)
    assert kv.layers[0].offsets.diff().tolist() == [3, 0, 3, 3, 3]


GDPA = {
    "gelu": dict(),
    "softmax": dict(activation="softmax"),
    "norm": dict(
        activation="softmax", config=jm.GDPAConfig(qk_norm=True, num_kv_heads=1, head_dim=6)
    ),
    "causal": dict(activation="softmax", mask=jm.AttentionMask(causal=True)),
    "window": dict(activation="silu", mask=jm.AttentionMask(causal=True, window=(2, 0))),
}


@pytest.mark.parametrize("name", GDPA)
def test_gdpa(name, page_rows):
    timeline, layer = Timeline(PARTS, TARGETS), jm.JaggedGDPA(WIDTH, HEADS, **GDPA[name]).double()
    context = jagged([x[: len(x) - t] for x, t in zip(timeline.rows, TARGETS)])
    kv, outputs = grow(layer, timeline, page_rows)
    targets = jagged(timeline.take(timeline.rows, -1))
    torch.testing.assert_close(layer.score(targets, kv).values, layer(targets, context).values)
    assert outputs == [None, None]


@pytest.mark.parametrize("name", ["causal", "window"])
def test_a_causal_gdpa_decodes(name, page_rows):
    """The outputs of new events are those of causal self-attention."""
    timeline, layer = Timeline(PARTS, [0] * 5), jm.JaggedGDPA(WIDTH, HEADS, **GDPA[name]).double()
    expected = list(layer(jagged(timeline.rows)).values.split(timeline.lengths))
    kv, _ = grow(layer, timeline, page_rows)
    out = layer.score(jagged(timeline.take(timeline.rows, 2)), kv)
    torch.testing.assert_close(out.values, torch.cat(timeline.take(expected, 2)))


def test_gdpa_with_targets_and_a_bias():
    timeline = Timeline(PARTS, TARGETS)
    layer = jm.JaggedGDPA(WIDTH, HEADS, "softmax", mask=jm.AttentionMask(causal=True)).double()
    bias = jm.RelativeBias(position=torch.randn(2 * 40 - 1, dtype=torch.float64))
    everything = jagged(timeline.rows)
    targets = jagged(timeline.take(timeline.rows, -1))
    counts = torch.tensor(TARGETS)
    full = layer(everything, num_targets=counts, bias=bias).values.split(timeline.lengths)
    scores = layer.score(targets, layer.cache(everything), num_targets=counts, bias=bias)
    torch.testing.assert_close(scores.values, torch.cat(timeline.take(list(full), -1)))


@pytest.mark.parametrize("form", ["jagged", "dense", "candidates"])
def test_target_attention(form, page_rows):
    timeline, layer = Timeline(PARTS, TARGETS), jm.JaggedTargetAttention(WIDTH, HEADS).double()
    history = jagged([x[: len(x) - t] for x, t in zip(timeline.rows, TARGETS)])
    kv, _ = grow(layer, timeline, page_rows)
    if form == "jagged":
        targets = jagged(timeline.take(timeline.rows, -1))
        torch.testing.assert_close(layer.score(targets, kv).values, layer(targets, history).values)
        return
    targets = torch.randn(5, 3, WIDTH, dtype=torch.float64)
    candidates = None if form == "dense" else torch.tensor([4, 0, 0, 2, 1])
    torch.testing.assert_close(
        layer.score(targets, kv, candidates), layer(targets, history, candidates)
    )


def test_scoring_runs_hooks_and_projects_no_history():
    """Forward hooks see cache and score, as they see a plain forward."""
    history = (torch.randn(5, WIDTH), torch.tensor([0, 2, 5]))
    targets = (torch.randn(2, WIDTH), torch.tensor([0, 1, 2]))
    for layer in (jm.JaggedTargetAttention(WIDTH, HEADS), jm.JaggedGDPA(WIDTH, HEADS)):
        calls, projections = [], []
        layer.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        layer.kv_proj.register_forward_hook(
            lambda *_, projections=projections: projections.append(1)
        )
        kv = layer.cache(history)
        layer.score(targets, kv)
        assert len(calls) == 2 and len(projections) == 1


NOT_APPENDABLE = {
    "contextual_seqlen must be 0 to append": dict(contextual_seqlen=2),
    "recent_history must be 0 to append": dict(recent_history=3),
    "min_full_attn_seqlen must be 0 with max_attn_len": dict(
        max_attn_len=2, min_full_attn_seqlen=1
    ),
    "global_prefix must be 0 with max_attn_len": dict(max_attn_len=2, global_prefix=1),
    "scaling_seqlen must be given": dict(scaling_seqlen=None),
}


@pytest.mark.parametrize("message, fields", NOT_APPENDABLE.items(), ids=NOT_APPENDABLE)
def test_configs_whose_earlier_rows_change(message, fields):
    stack = hstu(config_of(**fields))
    x = jm.Jagged(torch.randn(5, WIDTH, dtype=torch.float64), torch.tensor([0, 2, 5]), max_seqlen=4)
    kv = stack.cache(x)
    with pytest.raises(ValueError, match=f"^config.{message}"):
        stack.append(x, kv)
    cache = jm.PagedHistoryCache(stack, BUDGET)
    cache.put([0, 1], x)
    with pytest.raises(ValueError, match=f"^config.{message}"):
        cache.append([0, 1], x)


@pytest.mark.parametrize("option", ["num_seeds", "num_weights"])
def test_learned_rows_have_no_cache(option):
    layer = jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(**{option: 2}))
    x = (torch.randn(5, WIDTH), torch.tensor([0, 2, 5]))
    kv = jm.JaggedGDPA(WIDTH, HEADS).cache(x)
    for call in (lambda: layer.cache(x), lambda: layer.score(x, kv), lambda: layer.append(x, kv)):
        with pytest.raises(
            ValueError,
            match=f"^config.{option} must be 0 to cache keys and values of a context, got 2",
        ):
            call()


def test_forward_has_no_modes():
    x = torch.randn(5, WIDTH), torch.tensor([0, 2, 5])
    layers = (
        jm.JaggedTargetAttention(WIDTH, HEADS),
        jm.JaggedGDPA(WIDTH, HEADS),
        hstu(config_of()).float(),
    )
    for layer in layers:
        for option in (dict(cache=layer.cache(x)), dict(return_cache=True)):
            with pytest.raises(TypeError, match="unexpected keyword argument"):
                layer(x, x, **option)


class Halved(jm.JaggedTargetAttention):
    """Overrides a method, and calls the one that it overrides."""

    def cache(self, history):
        values, offsets = history
        return super().cache((values / 2, offsets))


def test_methods_are_calls_of_the_module():
    x = torch.randn(5, WIDTH), torch.tensor([0, 2, 5])
    for layer in (Halved(WIDTH, HEADS), jm.JaggedGDPA(WIDTH, HEADS), hstu(config_of()).float()):
        called = Mock(return_value=None)
        layer.register_forward_hook(called)
        kv = layer.cache(x)
        layer.score(x, kv)
        layer.append(x, kv)
        assert called.call_count == 3
    plain = jm.JaggedTargetAttention(WIDTH, HEADS)
    plain.load_state_dict((halved := Halved(WIDTH, HEADS)).state_dict())
    expected = plain.cache((x[0] / 2, x[1])).layers[0].values
    assert torch.equal(halved.cache(x).layers[0].values, expected)


class CopiesToMeta(TorchDispatchMode):
    """Counts tensors that are copied from the host to the meta device, as a stand-in for a GPU."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.count += (
            function is torch.ops.aten._to_copy.default and out.is_meta and not args[0].is_meta
        )
        return out


@pytest.mark.parametrize("num_layers", [1, 3])
def test_all_layers_share_one_copy_of_the_offsets(num_layers):
    stack = jm.HSTUStack(WIDTH, HEADS, num_layers, config_of(), device="meta")
    rows = torch.empty(5, WIDTH, device="meta"), torch.tensor([0, 2, 5])
    with torch.no_grad():
        kv = stack.cache(rows)
        for call in (stack.cache, lambda x: stack.append(x, kv), lambda x: stack.score(x, kv)):
            with CopiesToMeta() as copies:
                call(rows)
            assert copies.count == 1
