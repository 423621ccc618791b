"""Appended and full forwards of an HSTU, each within the bounds of the definition in float64, on
the CPU and on a GPU."""

import accuracy
import pytest
import torch
from marks import slow_after

import jagged_modules as jm

from .caching import HSTU_CONFIGS, Rows, Timeline, jagged, rows_of
from .hstu_cases import HEADS, WIDTH, PaddedHSTU, converted

PARTS, TARGETS, LAYERS = [[5, 0, 12, 1, 7], [1, 0, 0, 3, 2], [0, 0, 5, 1, 6]], [2, 1, 4, 0, 3], 2
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def bounds_of(padded: PaddedHSTU, timeline: Timeline, dtype: torch.dtype) -> list[accuracy.Bound]:
    """The bound of the output rows, by Monte Carlo arithmetic."""
    names, parameters = zip(*padded.named_parameters())
    rows = torch.cat([x.cpu() for x in timeline.rows])

    def definition(x, *parameters):
        return torch.func.functional_call(
            padded, dict(zip(names, parameters, strict=True)), (x, timeline.lengths, TARGETS)
        )

    tensors = dict(zip(("x", *names), (rows, *parameters), strict=True))
    return accuracy.definition(definition, tensors, torch.ones(len(rows), WIDTH, dtype=dtype))[
        "out"
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_rows", [16, 128])
@slow_after(1, "name", ["plain", "short", "dims"])
def test_appended_rows_and_scores(name, page_rows, dtype, device):
    """Pages of 16 rows are copied. Into pages of 128 the new rows are written first, then attention
    reads them there."""
    config, timeline = HSTU_CONFIGS[name], Timeline(PARTS, TARGETS, dtype, device=device)
    padded = PaddedHSTU(LAYERS, config).to(dtype)
    stack = jm.HSTUStack(WIDTH, HEADS, LAYERS, config).to(dtype)
    stack.load_state_dict(converted(dict(padded.named_parameters())))
    stack, cache, users = stack.to(device).eval(), None, list("abcde")
    with torch.no_grad():
        full = stack(jagged(timeline.rows).to(device), torch.tensor(TARGETS, device=device)).values
        cache = jm.PagedHistoryCache(stack, 2**22, page_rows)
        cache.put(users, jagged([x[:0] for x in timeline.rows]).to(device))
        parts = [
            cache.append(users, jagged(timeline.take(timeline.rows, i)).to(device)).values
            for i in range(len(PARTS))
        ]
        parts.append(
            stack.score(
                jagged(timeline.take(timeline.rows, -1)).to(device), cache.select(users)
            ).values
        )
    cached = torch.empty_like(full)
    order = torch.arange(len(full)).split(timeline.lengths)
    for i, part in zip((0, 1, 2, -1), parts, strict=True):
        cached[torch.cat(timeline.take(list(order), i)).to(device)] = part
    bound = bounds_of(padded, timeline, dtype)
    accuracy.assert_accurate(
        {"full": full.cpu(), "cached": cached.cpu()}, {"full": bound, "cached": bound}
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_target_attention(dtype, device):
    layer, heads = jm.JaggedTargetAttention(32, 2).to(dtype), 2
    timeline = Timeline([[70, 0, 20], [1, 3, 0], [40, 0, 30]], [5, 1, 2], dtype, width=32)
    names, parameters = zip(*((name, x.detach().clone()) for name, x in layer.named_parameters()))

    def definition(x, *parameters):
        w = dict(zip(names, parameters, strict=True))
        results = []
        for rows, t in zip(x.split(timeline.lengths), timeline.targets, strict=True):
            q = (
                torch.nn.functional.linear(rows[-t:], w["q_proj.weight"], w["q_proj.bias"])
                .unflatten(1, (heads, -1))
                .transpose(0, 1)
            )
            kv = torch.nn.functional.linear(
                rows[:-t], w["kv_proj.weight"], w["kv_proj.bias"]
            ).unflatten(1, (2, heads, -1))
            k, v = (y.transpose(0, 1) for y in kv.unbind(1))
            out = ((q @ k.mT * k.shape[-1] ** -0.5).softmax(dim=-1) @ v).transpose(0, 1).flatten(1)
            results.append(
                torch.nn.functional.linear(out, w["out_proj.weight"], w["out_proj.bias"])
            )
        return torch.cat(results)

    tensors = dict(zip(("x", *names), (torch.cat(timeline.rows), *parameters), strict=True))
    bound = accuracy.definition(
        definition, tensors, torch.ones(sum(timeline.targets), 32, dtype=dtype)
    )["out"]
    users, layer = ["a", "b", "c"], layer.to(device)
    history, targets, *parts = (
        jagged(x).to(device)
        for x in (
            [x[:-t] for x, t in zip(timeline.rows, timeline.targets)],
            *(timeline.take(timeline.rows, i) for i in (-1, 0, 1, 2)),
        )
    )
    with torch.no_grad():
        cache = jm.PagedHistoryCache(layer, 2**22)
        cache.put(users, parts[0])
        for part in parts[1:]:
            cache.append(users, part)
        results = {
            "full": layer(targets, history),
            "cached": layer.score(targets, cache.select(users)),
        }
    accuracy.assert_accurate(
        {name: x.values.cpu() for name, x in results.items()}, dict.fromkeys(results, bound)
    )


@pytest.mark.gpu
def test_calls_on_several_streams_wait_for_one_another():
    """A put on a stream that is busy, then a select on another stream, and the reverse."""
    cache, side = jm.PagedHistoryCache(Rows().cuda(), 2**24), torch.cuda.Stream()
    rows = [torch.randn(1000, 2, device="cuda") for _ in range(3)]
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(10**8)
        cache.put([1, 2, 3], jagged(rows).to("cuda"))
    kept = rows_of(cache.select([3, 1]))
    assert torch.equal(kept[0], rows[2]) and torch.equal(kept[1], rows[0])
    torch.cuda._sleep(10**8)
    kept = rows_of(cache.select([1]))
    with torch.cuda.stream(side):
        cache.put([1], jagged([rows[1]]).to("cuda"))
    assert torch.equal(kept[0], rows[0])
