"""JaggedSelfTargetAttention with a mask, and with cached histories."""

import dataclasses
import itertools

import pytest
import torch
from torch import nn

import jagged_modules as jm
from jagged_modules import functional as F

from .graph_cases import compiled
from .test_self_target_layer import HEADS, OFFSETS, WIDTH, Attentions, heads

GROWING = {  # masks under which later events change no earlier one
    "causal": jm.AttentionMask(causal=True),
    "window": jm.AttentionMask(causal=True, window=(2, None)),
    "semi-local": jm.AttentionMask(causal=True, max_attn_len=2, global_prefix=1),
}
OTHERS = {
    "none": None,
    "local": jm.AttentionMask(window=(1, 1)),
    "context": jm.AttentionMask(causal=True, contextual_seqlen=2),
    "recent": jm.AttentionMask(causal=True, recent_history=2),
    "full": jm.AttentionMask(causal=True, max_attn_len=1, min_full_attn_seqlen=1),
}
MASKS = GROWING | OTHERS
LENGTHS, FIRST = [4, 0, 5], [3, 0, 2]  # events of each user, and those that come first


def make_layer(mask, **options):
    torch.manual_seed(0)
    return jm.JaggedSelfTargetAttention(WIDTH, HEADS, mask=MASKS[mask], **options).double()


def make_inputs():
    index = torch.tensor([2, 0, 2, 1, 0])
    return torch.randn(9, WIDTH).double(), torch.randn(5, 3, WIDTH).double(), index


def make_bias(history):
    """With tables that learn. The next event does not change a row's own time."""
    tables = torch.randn(HEADS, 9).double(), torch.randn(4).double()
    times = torch.arange(len(history)) * 7
    return jm.RelativeBias(*(x.requires_grad_() for x in tables), times, query_timestamps=times + 1)


def in_two_calls(layer, history, targets, index, bias=None):
    """By an attention of the events under the mask, and one of the targets without."""
    k, v = heads(layer.kv_proj(history).unflatten(-1, (2, WIDTH))).unbind(1)
    own = F.jagged_attention(
        heads(layer.q_proj(history)), k, v, OFFSETS, mask=layer.mask, bias=bias
    )
    of_targets = F.target_attention(heads(layer.target_proj(targets)), k, v, index, OFFSETS)
    return layer.out_proj(own.flatten(1)), layer.target_out_proj(of_targets.flatten(-2))


@pytest.mark.parametrize("calls_modules", [False, True], ids=["node", "modules"])
@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_hides_events_from_events_alone(mask, calls_modules):
    layer, (history, targets, index) = make_layer(mask), make_inputs()
    leaves = [history.requires_grad_(), targets.requires_grad_(), *layer.parameters()]
    if calls_modules:
        layer.out_proj.register_forward_hook(lambda *_: None)
    (values, _), out = layer((history, OFFSETS), targets, index)
    assert (type(values.grad_fn).__name__ == "_NodeBackward") != calls_modules
    with Attentions() as mode:
        layer((history, OFFSETS), targets, index)
    assert mode.calls == 1
    expected = in_two_calls(layer, history, targets, index)
    torch.testing.assert_close((values, out), expected)
    gradients, theirs = (
        torch.autograd.grad(x[0].square().sum() + x[1].square().sum(), leaves)
        for x in ((values, out), expected)
    )
    torch.testing.assert_close(gradients, theirs)


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_bias_is_that_of_events_alone(mask):
    layer, (history, targets, index) = make_layer(mask), make_inputs()
    bias = make_bias(history)
    leaves = [history.requires_grad_(), targets.requires_grad_(), bias.position, bias.time]
    leaves += layer.parameters()
    with Attentions() as mode:
        (values, _), out = layer((history, OFFSETS), targets, index, bias)
    assert mode.calls == 1
    expected = in_two_calls(layer, history, targets, index, bias)
    torch.testing.assert_close((values, out), expected)
    gradients, theirs = (
        torch.autograd.grad(x[0].square().sum() + x[1].square().sum(), leaves)
        for x in ((values, out), expected)
    )
    torch.testing.assert_close(gradients, theirs)


def test_gradcheck_with_a_mask():
    layer, (history, targets, index) = make_layer("window"), make_inputs()

    def call(history, targets):
        (values, _), out = layer((history, OFFSETS), targets, index)
        return values, out

    assert torch.autograd.gradcheck(call, (history.requires_grad_(), targets.requires_grad_()))


def test_a_mask_of_levels():
    """Each level's events are under the mask, and the targets see all of them."""
    layer, (history, targets, index) = make_layer("causal"), make_inputs()
    others = (history[:6], torch.tensor([0, 1, 6]))
    levels, places = ((history, OFFSETS), others), (index, torch.tensor([1, 1, 0, 0, 1]))
    results, out = layer(levels, targets, places)
    for (values, _), level in zip(results, levels):
        no_targets = targets[:0], torch.zeros(0, dtype=torch.int64)
        torch.testing.assert_close(values, layer(level, *no_targets)[0][0])
    layer.mask = None
    torch.testing.assert_close(out, layer(levels, targets, places)[1])


# -- cached histories ------------------------------------------------------------------------------


def split(history):
    """The first events of each user, and those that follow, as `(values, offsets)`."""
    later = [n - first for n, first in zip(LENGTHS, FIRST)]
    parts = [x.split([first, len(x) - first]) for x, first in zip(history.split(LENGTHS), FIRST)]
    return [
        (torch.cat(rows), torch.tensor([0, *itertools.accumulate(lengths)]))
        for rows, lengths in zip(zip(*parts), (FIRST, later))
    ]


@pytest.mark.parametrize("mask", MASKS)
def test_cached_histories(mask):
    """Scores and new events' rows are those of the forward over all events."""
    layer, (history, targets, index) = make_layer(mask), make_inputs()
    (values, _), out = layer((history, OFFSETS), targets, index)
    first, later = split(history)
    torch.testing.assert_close(
        layer.score(targets, layer.cache((history, OFFSETS)), index), out, rtol=0, atol=1e-14
    )
    cache = layer.cache(first)
    rows, new = layer.append(later, cache)
    torch.testing.assert_close(layer.score(targets, cache.append(new), index), out)
    assert (rows is None) == (mask in OTHERS)
    if rows is not None:
        assert rows[1] is later[1]
        torch.testing.assert_close(rows[0], split(values)[1][0])
        (before, _), _ = layer(first, targets, index)
        torch.testing.assert_close(before, split(values)[0][0])


@pytest.mark.parametrize("page_rows", [None, 4, 128])
def test_cached_histories_with_a_bias(page_rows):
    """New events' rows are those of the forward over all events; scores have no bias."""
    layer, (history, targets, index) = make_layer("causal").eval(), make_inputs()
    bias = make_bias(history)
    asked = split(bias.query_timestamps)[1][0]
    (values, _), out = layer((history, OFFSETS), targets, index, bias)
    first, later = split(history)
    given = dataclasses.replace(bias, query_timestamps=asked)
    with torch.no_grad():
        if page_rows is None:
            cache = layer.cache(first)
            (rows, _), new = layer.append(later, cache, given)
            cache = cache.append(new)
        else:
            users, pages = ["a", "b", "c"], jm.PagedHistoryCache(layer, 2**20, page_rows)
            pages.put(users, first)
            rows, _ = pages.append(users, later, bias=given)
            cache = pages.select(users)
        torch.testing.assert_close(rows, split(values)[1][0])
        torch.testing.assert_close(layer.score(targets, cache, index), out)


def test_the_other_masks_change_earlier_events():
    """So `append` must not return rows under them."""
    for mask in OTHERS:
        layer, (history, targets, index) = make_layer(mask), make_inputs()
        (values, _), _ = layer((history, OFFSETS), targets, index)
        first, _ = split(history)
        (before, _), _ = layer(first, targets, index)
        assert not torch.allclose(before, split(values)[0][0]), mask


def test_learning_through_a_grown_cache():
    """Parameters get the gradients of the full forward."""
    layer, (history, targets, index) = make_layer("causal"), make_inputs()
    (values, _), out = layer((history, OFFSETS), targets, index)
    parameters = list(layer.parameters())
    expected = torch.autograd.grad(
        split(values)[1][0].square().sum() + out.square().sum(), parameters
    )
    first, later = split(history)
    cache = layer.cache(first)
    (rows, _), new = layer.append(later, cache)
    scores = layer.score(targets, cache.append(new), index)
    found = torch.autograd.grad(rows.square().sum() + scores.square().sum(), parameters)
    torch.testing.assert_close(found, expected)


def test_scores_of_levels():
    layer, (history, targets, index) = make_layer("none"), make_inputs()
    levels = (history, OFFSETS), (history[:6], torch.tensor([0, 1, 6]))
    places = index, torch.tensor([1, 1, 0, 0, 1])
    scores = layer.score(targets, tuple(map(layer.cache, levels)), places)
    torch.testing.assert_close(scores, layer(levels, targets, places)[1])


@pytest.mark.parametrize("mask", ["none", "causal"])
def test_a_paged_cache(mask):
    """Pages that attention reads, and others."""
    layer, (history, targets, index) = make_layer(mask).eval(), make_inputs()
    first, later = split(history)
    with torch.no_grad():
        (values, _), out = layer((history, OFFSETS), targets, index)
        for page_rows in (4, 128):
            cache = jm.PagedHistoryCache(layer, 2**20, page_rows)
            cache.put(["a", "b", "c"], first)
            rows = cache.append(["a", "b", "c"], later)
            scores = layer.score(targets, cache.select(["a", "b", "c"]), index)
            torch.testing.assert_close(scores, out)
            assert (rows is None) == (mask == "none")
            if rows is not None:
                torch.testing.assert_close(rows[0], split(values)[1][0])


def test_errors():
    targets = torch.tensor([1])
    for mask, error, message in (
        ("causal", TypeError, "^mask must be an AttentionMask, got str"),
        (
            jm.AttentionMask(num_targets=targets),
            ValueError,
            "^mask.num_targets must be None: targets are no rows of the history; got Attention",
        ),
    ):
        with pytest.raises(error, match=message):
            jm.JaggedSelfTargetAttention(16, 2, mask=mask)
    with pytest.raises(TypeError, match=r"write mask=AttentionMask\(causal=True\)"):
        jm.JaggedSelfTargetAttention(16, 2, causal=True)
    layer, (history, targets, index) = make_layer("causal"), make_inputs()
    cache = layer.cache((history, OFFSETS))
    events = history[:2], torch.tensor([0, 2])
    level, later = (history, OFFSETS), (history[:2], torch.tensor([0, 1, 1, 2]))
    time, times = torch.ones(4).double(), [torch.arange(n) for n in (9, 11)]
    short = jm.RelativeBias(torch.ones(7).double())
    late, asked = (jm.RelativeBias(None, time, times[0], query_timestamps=x) for x in times)
    for call, message in (
        (
            lambda: layer.append(later, cache, short),
            "^cache and events must have segments of at most 4 rows, those of bias.position",
        ),
        (
            lambda: layer.append(later, cache, late),
            "element for each row of cache and events, 11, ",
        ),
        (
            lambda: layer(level, targets, index, short),
            "^history must have .* at most 4 rows, .* got 5",
        ),
        (lambda: layer(level, targets, index, asked), "for each row of history, 9, got 11"),
        (
            lambda: layer((level, level), targets, (index, index), short),
            "^bias must be None with several levels, got a RelativeBias",
        ),
        (lambda: layer.append(events, cache), "events and cache must have the same number of seg"),
        (lambda: layer.score(targets, cache, index[:3]), "candidates describe 3 candidates, targ"),
        (lambda: make_layer("none").score(targets, nn.Linear(1, 1), index), "cache must be a Hist"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            call()
    assert "mask=AttentionMask(causal=True)" in repr(layer)


def inputs_of_two_sizes():
    for rows, offsets in ((9, OFFSETS), (12, torch.tensor([0, 3, 3, 5, 12]))):
        _, targets, index = make_inputs()
        yield torch.randn(rows, WIDTH).double().requires_grad_(), offsets, targets, index


def with_a_mask(layer, history, offsets, targets, index):
    (values, _), out = layer((history, offsets), targets, index)
    return values, out


def test_compiled_with_a_mask():
    """One graph for all sizes, with gradients."""
    layer = make_layer("window")
    graph, counter = compiled(with_a_mask)
    for history, *inputs in inputs_of_two_sizes():
        found, expected = (call(layer, history, *inputs) for call in (graph, with_a_mask))
        torch.testing.assert_close(found, expected)
        leaves = [history, *layer.parameters()]
        gradients, theirs = (
            torch.autograd.grad(x[0].square().sum() + x[1].square().sum(), leaves)
            for x in (found, expected)
        )
        torch.testing.assert_close(gradients, theirs)
    assert counter.frame_count == 1


def test_exported_with_a_mask():
    """One program for all sizes."""
    layer, program = make_layer("window").eval(), None
    for history, offsets, *inputs in inputs_of_two_sizes():
        arguments = (history.detach(), offsets), *inputs
        if program is None:
            some, users = torch.export.Dim("rows", min=2), torch.export.Dim("users", min=1)
            shapes = ({0: some}, {0: users + 1}), {}, {}
            program = torch.export.export(layer, arguments, dynamic_shapes=shapes).module()
        (values, _), out = program(*arguments)
        torch.testing.assert_close(
            (values, out), with_a_mask(layer, history.detach(), offsets, *inputs)
        )
