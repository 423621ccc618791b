"""`jagged_attention` with functions of scores and of pairs, beside each pair by itself."""

import accuracy
import pytest
import torch

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE
from jagged_modules.functional.scored_attention import Pairs

LENGTHS, KEYS, HEADS = [3, 0, 2, 2, 1], [4, 6, 0, 3, 1], 4
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def offsets_of(lengths, device="cpu"):
    return torch.tensor([0, *lengths], device=device).cumsum(0)


def operands(dtype=torch.float64, device="cpu"):
    shapes = dict(
        q=(sum(LENGTHS), HEADS, 16), k=(sum(KEYS), 2, 16), v=(sum(KEYS), 2, 8), table=(HEADS, 32)
    )
    return {name: torch.randn(x, dtype=dtype, device=device) for name, x in shapes.items()}


def score(table):
    """It reads all that a pair has. A pair may be hidden."""

    def changed(s, at):
        s = s + table[at.head, at.q - at.k + 16] * (1 + at.segment) + at.q_row * 0.01
        s = (s / (1 + at.k_row)).tanh() * at.q_len + at.k_len
        return s.masked_fill((at.k == 2) & (at.head == 1), -torch.inf)

    return changed


def visible(at):
    return (at.q >= at.k) & ((at.q_row + at.k_row) % 3 > 0) | (at.head == 3) & (at.k > 0)


def by_pairs(q, k, v, table, activation, visible):
    """Each query row and head by itself."""
    k_offsets, rows, row = offsets_of(KEYS), [], 0
    for segment, (q_len, k_len) in enumerate(zip(LENGTHS, KEYS)):
        for place in range(q_len):
            for head in range(HEADS):
                keys = range(int(k_offsets[segment]), int(k_offsets[segment + 1]))
                total, sums = q.new_zeros(()), v.new_zeros(v.shape[2])
                for j, key in enumerate(keys):
                    at = (segment, head, place, j, row, key, q_len, k_len)
                    at = Pairs(*[torch.tensor(x, device=q.device) for x in at])
                    if not visible(at):
                        continue
                    s = score(table)(q[row, head] @ k[key, head // 2] / 4, at)
                    if activation == "softmax":
                        p = s.exp()
                        total = total + p
                    else:
                        p = POINTWISE[activation].function(s)
                    sums = sums + p * v[key, head // 2]
                rows.append(sums / total if activation == "softmax" and total > 0 else sums)
            row += 1
    return torch.stack(rows).unflatten(0, (-1, HEADS))


def ours(q, k, v, table, activation="softmax", mask=visible, **options):
    offsets = offsets_of(LENGTHS, q.device), offsets_of(KEYS, q.device)
    return F.jagged_attention(
        q, k, v, *offsets, activation=activation, score=score(table), mask=mask, **options
    )


@pytest.mark.parametrize("activation", ["softmax", "sigmoid"])
@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_results_and_gradients(activation, implementation):
    given = [x.requires_grad_() for x in operands().values()]
    found = ours(*given, activation, implementation=implementation)
    expected = by_pairs(*given, activation, visible)
    for x, y in zip(
        (found, *torch.autograd.grad(found.sin().sum(), given)),
        (expected, *torch.autograd.grad(expected.sin().sum(), given)),
        strict=True,
    ):
        torch.testing.assert_close(x, y)


@DEVICES
def test_accuracy_in_float32(device):
    tensors = operands(torch.float32, device)

    def theirs(q, k, v, table):
        return by_pairs(q, k, v, table, "softmax", visible)

    accuracy.check(ours, lambda *x: accuracy.definition(theirs, tensors, x[-1]), tensors)


@DEVICES
def test_16_bits_are_rounded_once(device):
    given = [x.bfloat16() for x in operands(device=device).values()]
    wide = [x.float() for x in given]
    assert torch.equal(ours(*given[:3], wide[3]), ours(*wide).bfloat16())
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(ours(*wide[:3], wide[3]), ours(*given[:3], wide[3]))


@pytest.mark.parametrize(
    "mask",
    [
        jm.AttentionMask(causal=True),
        jm.AttentionMask(causal=True, num_targets=torch.tensor([1, 0, 0, 3, 0]), max_attn_len=4),
        jm.AttentionMask(window=(2, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("output_scale", [0.5, torch.tensor([1.0, 2, 3, 4, 5]).double()])
def test_an_attention_mask_and_what_needs_no_function(mask, output_scale):
    q, k, v, _ = operands().values()
    offsets = offsets_of(LENGTHS), offsets_of(KEYS)
    options = dict(activation="silu", mask=mask, output_scale=output_scale, scale=0.3)
    found = F.jagged_attention(q, k, v, *offsets, score=lambda s, at: s, **options)
    torch.testing.assert_close(found, F.jagged_attention(q, k, v, *offsets, **options))


@pytest.mark.gpu
def test_nothing_reads_rows_behind_the_last_segment():
    given = operands(torch.float32, "cuda")
    behind = [torch.cat([x, x.new_full((3, *x.shape[1:]), torch.nan)]) for x in given.values()]
    leaves = [x.requires_grad_() for x in behind[:3]]
    out = ours(*leaves, given["table"])
    assert torch.equal(out[:-3], ours(*given.values())) and not out[-3:].any()
    for x in torch.autograd.grad(out.sum(), leaves):
        assert x.isfinite().all() and not x[-3:].any()


@pytest.mark.parametrize("lengths", [[], [0], [0, 0]])
def test_nothing_to_attend_to(lengths):
    q, k, v = (torch.randn(0, 4, 8, requires_grad=True) for _ in range(3))
    out = F.jagged_attention(q, k, v, offsets_of(lengths), score=lambda s, at: s + 1)
    out.sum().backward()
    assert out.shape == q.grad.shape == (0, 4, 8)


BAD = {
    "no function": (dict(score=3), TypeError, "score must be a function, got int"),
    "no mask": (dict(mask=3), TypeError, "mask must be an AttentionMask or a function, got int"),
    "a number": (
        dict(score=lambda s, at: 1.0),
        TypeError,
        "score must return a tensor of floating-point scores, got float",
    ),
    "no booleans": (
        dict(mask=lambda at: at.q),
        TypeError,
        "mask must return a tensor of booleans, got torch.int64",
    ),
    "shape": (
        dict(score=lambda s, at: s[:, :3]),
        ValueError,
        r"score must return a tensor that expands to \[4, 19\], heads and pairs, got shape",
    ),
    "dropout": (
        dict(score=lambda s, at: s, dropout_p=0.1),
        ValueError,
        "dropout_p must be 0 with score or a function as mask, got 0.1",
    ),
    "bias": (
        dict(score=lambda s, at: s, bias=jm.RelativeBias(position=torch.zeros(4, 9))),
        ValueError,
        "bias must be None with score or a function as mask",
    ),
    "shared": (
        dict(mask=visible, kv_offsets="shared"),
        ValueError,
        'must be tensors with score or a function as mask, got "shared"',
    ),
    "groups": (
        dict(mask=visible, q_offsets=torch.zeros(11, dtype=torch.int64)),
        ValueError,
        "q_offsets must have as many segments as kv_offsets .*, 5, got 10",
    ),
    "hopper": (dict(mask=visible, implementation="hopper"), ValueError, "hopper"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments(case):
    options, kind, message = BAD[case]
    q, k, v, _ = operands().values()
    if case == "groups":
        q = q[:0]
    offsets = dict(q_offsets=offsets_of(LENGTHS), kv_offsets=offsets_of(KEYS))
    with pytest.raises(kind, match=message):
        F.jagged_attention(q, k, v, **offsets | options)


def test_a_graph_is_an_error():
    call = torch.compile(ours, backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="call it outside of torch.compile"):
        call(*operands().values())
