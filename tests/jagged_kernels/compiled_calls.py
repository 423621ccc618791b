"""Every public function and layer for the tests of torch.compile: one graph must serve all lengths
and batch sizes.

FUNCTIONS: name → (function, (segments, rows, candidates) → its inputs); it also takes
`implementation`.
LAYERS: name → (device → layer, (segments, rows, candidates) → inputs, (*inputs, layer) → result).
"""

from functools import partial

import pytest
import torch
from marks import SLOW
from torch._dynamo.testing import CompileCounterWithBackend

import jagged_modules as jm
from jagged_modules import functional as F

# segments, rows, candidates; no two sizes of a batch equal
SIZES = [(5, 41, 11), (7, 59, 37), (13, 14, 15)]
HEADS, DIM, WIDTH = 2, 48, 96  # a head dim that Hopper's kernels support
ROTARY = jm.Rotary.from_frequencies(DIM, 100)


def random_offsets(segments: int, total: int) -> torch.Tensor:
    inner = torch.randint(total, (segments - 1,)).sort().values
    return torch.cat([torch.zeros(1, dtype=torch.int64), inner, torch.tensor([total])])


def _heads(*rows: int) -> list[torch.Tensor]:
    return [torch.randn(n, HEADS, DIM) for n in rows]


def _self_inputs(segments, rows, candidates):
    return *_heads(rows, rows, rows), random_offsets(segments, rows)


def _cross_inputs(segments, rows, candidates):
    return (
        *_heads(candidates, rows, rows),
        random_offsets(segments, candidates),
        random_offsets(segments, rows),
    )


def _tables(rows):
    """Of a bias by position, and by time, and timestamps. A size that an input has too would be one
    symbol with it, and a table's number of buckets is a constant of the graph."""
    return torch.randn(119), torch.randn(HEADS, 13), torch.randint(100, (rows,))


def _matrix_inputs(segments, rows, candidates):
    return torch.randn(rows, DIM), torch.randn(segments, DIM, 20), random_offsets(segments, rows)


def _plan_inputs(segments, rows, candidates):
    x, y = random_offsets(segments, candidates), random_offsets(segments, rows)
    return torch.randn(candidates, DIM), torch.randn(rows, DIM), F.ScorePlan.from_offsets(x, y)


def _compress_inputs(segments, rows, candidates):
    weights = (torch.randn(16, 9), torch.randn(16, 10))
    embeddings = (torch.randn(segments, 9, DIM), torch.randn(candidates, 10, DIM))
    return *weights, *embeddings, torch.randint(segments, (candidates,))


def _target_attention(q, k, v, candidate_offsets, offsets, **options):
    return F.target_attention(
        q.unsqueeze(1), k, v, jm.CandidateIndex.from_offsets(candidate_offsets), offsets, **options
    ).squeeze(1)


def _targets_in_any_order(q, k, v, users, offsets, **options):
    index = jm.CandidateIndex.from_map(users, offsets.shape[0] - 1)
    return F.target_attention(q.unsqueeze(1), k, v, index, offsets, **options)


def _masked(q, k, v, offsets, **options):
    mask = jm.AttentionMask(causal=True, num_targets=offsets.diff() // 3, max_attn_len=9)
    return F.jagged_attention(
        q, k, v, offsets, mask=mask, activation="silu", output_scale=0.125, **options
    )


def _biased(q, k, v, position, time, timestamps, offsets, **options):
    options |= dict(mask=jm.AttentionMask(causal=True))
    bias = _bias_of(position, time, timestamps, offsets)
    return F.jagged_attention(q, k, v, offsets, bias=bias, **options)


def _bias_of(position, time, timestamps, offsets):
    return jm.RelativeBias(
        position, time, timestamps, query_timestamps=timestamps + 7, query_shift=offsets.diff() % 2
    )


def _scaled_by_segment(q, k, v, offsets, **options):
    return F.jagged_attention(
        q,
        k,
        v,
        offsets,
        activation="gelu_tanh",
        output_scale=1 / (1 + offsets.diff().to(q.dtype)),
        **options,
    )


def _two_groups(q, k, v, candidate_offsets, offsets, **options):
    return torch.cat(F.self_target_attention(k, q, k, v, offsets, candidate_offsets, **options))


def _two_biased_groups(q, k, v, *others, **options):
    *tables, candidate_offsets, offsets = others
    bias = _bias_of(*tables, offsets)
    return _two_groups(q, k, v, candidate_offsets, offsets, bias=bias, **options)


def _unfused(x, y, plan, **options):
    p = F.jagged2_softmax(F.jagged_jagged_bmm_jagged_out(x, y, plan, **options), plan, **options)
    return F.array_jagged_bmm_jagged_out(
        F.jagged2_softmax(p, plan, dim=-2, **options), y, plan, **options
    )


def _block_attention(rotate):
    def call(q, k, v, offsets, **options):
        rotary = rotate and jm.Rotary(ROTARY.cos, ROTARY.sin, rotate, linear=True)
        return F.block_diagonal_attention(q, k, v, offsets, block_size=16, rotary=rotary, **options)

    return call


def _packed(q, k, v, offsets, **options):
    return F.block_diagonal_attention_packed(
        torch.stack([q, k, v], 1), offsets, block_size=16, **options
    )


def _compress(w_user, w_candidate, users, candidates, index, implementation="auto"):
    return F.linear_compress(
        (w_user, w_candidate), (users, candidates), index, implementation=implementation
    )


def _din(q, k, w1, w2, w3, users, offsets, **options):
    biases = [w.mean(1) for w in (w1, w2, w3)]
    return F.din_attention(
        q, k, k, users, offsets, (w1, w2, w3), biases, activation="silu", normalize="softmax",
        **options,
    )  # fmt: skip


def _din_inputs(segments, rows, n):
    return (
        *(torch.randn(size, DIM) for size in (n, rows)),
        *(torch.randn(size) for size in ((20, 4 * DIM), (9, 20), (1, 9))),
        torch.randint(segments, (n,)),
        random_offsets(segments, rows),
    )


FUNCTIONS = {
    "jagged_attention": (F.jagged_attention, _self_inputs),
    "jagged_attention-cross": (F.jagged_attention, _cross_inputs),
    "jagged_attention-masked": (_masked, _self_inputs),
    "jagged_attention-biased": (
        _biased,
        lambda segments, rows, _: (
            *_heads(rows, rows, rows),
            *_tables(rows),
            random_offsets(segments, rows),
        ),  # fmt: skip
    ),
    "jagged_attention-scaled": (_scaled_by_segment, _self_inputs),
    "jagged_attention-negative-scale": (
        lambda *x, **options: F.jagged_attention(*x, scale=-0.2, **options),
        _self_inputs,
    ),
    "jagged_attention-shared-q": (
        lambda q, k, v, offsets, **options: F.jagged_attention(
            q, k, v, "shared", offsets, **options
        ),
        lambda segments, rows, _: (*_heads(3, rows, rows), random_offsets(segments, rows)),
    ),
    "jagged_attention-shared-kv": (
        lambda q, k, v, offsets, **options: F.jagged_attention(
            q, k, v, offsets, "shared", activation="relu", **options
        ),
        lambda segments, rows, _: (*_heads(rows, 3, 3), random_offsets(segments, rows)),
    ),
    "target_attention": (_target_attention, _cross_inputs),
    "target_attention-any-order": (
        _targets_in_any_order,
        lambda segments, rows, n: (
            *_heads(n, rows, rows),
            torch.randint(segments, (n,)),
            random_offsets(segments, rows),
        ),
    ),
    "self_target_attention": (_two_groups, _cross_inputs),
    "self_target_attention-masked": (
        partial(_two_groups, mask=jm.AttentionMask(causal=True)),
        _cross_inputs,
    ),
    "self_target_attention-biased": (
        _two_biased_groups,
        lambda segments, rows, n: (
            *_heads(n, rows, rows),
            *_tables(rows),
            *_cross_inputs(segments, rows, n)[3:],
        ),  # fmt: skip
    ),
    "din_attention": (_din, _din_inputs),
    "din_attention-masked": (
        partial(_din, mask=jm.AttentionMask(window=(9, None), global_prefix=3)),
        _din_inputs,
    ),
    "block_diagonal_attention": (_block_attention(None), _self_inputs),
    "block_diagonal_attention-qk": (_block_attention("qk"), _self_inputs),
    "block_diagonal_attention-qkv": (_block_attention("qkv"), _self_inputs),
    "block_diagonal_attention_packed": (_packed, _self_inputs),
    "linear_compress": (_compress, _compress_inputs),
    "jagged_dense_bmm": (
        lambda x, w, offsets, **options: F.jagged_dense_bmm(x, w, offsets, **options),
        _matrix_inputs,
    ),
    "jagged_jagged_bmm": (
        lambda x, w, offsets, **options: F.jagged_jagged_bmm(x, x * w.sum(), offsets, **options),
        _matrix_inputs,
    ),
    "jagged_softmax": (
        lambda x, w, offsets, **options: F.jagged_softmax(x, offsets, **options) * w.sum(),
        _matrix_inputs,
    ),
    "jagged_linear": (
        lambda x, w, offsets, **options: F.jagged_linear(
            x, w, w.mean(1), offsets, "silu", **options
        ),
        _matrix_inputs,
    ),
    "jagged_linear-max_seqlen": (
        lambda x, w, offsets, **options: F.jagged_linear(
            x, w, w.mean(1), offsets, "silu", max_seqlen=100, **options
        ),
        _matrix_inputs,
    ),
    "score-matrices": (_unfused, _plan_inputs),
    "jagged_jagged_bmm_jagged_out-itself": (
        lambda x, plan, **options: F.jagged_jagged_bmm_jagged_out(x, x, plan, **options),
        lambda segments, rows, _: (
            torch.randn(rows, DIM),
            F.ScorePlan.from_offsets(random_offsets(segments, rows)),
        ),
    ),
}

# The names as parameters of a test. Variants of a function that is itself in the list are slow.
NAMES = [
    pytest.param(name, marks=SLOW) if "-" in name and name.partition("-")[0] in FUNCTIONS else name
    for name in FUNCTIONS
]


def _with_candidates(targets, values, offsets, candidate_offsets, layer):
    return layer(
        targets.unsqueeze(1), (values, offsets), jm.CandidateIndex.from_offsets(candidate_offsets)
    )


def _rows_inputs(segments, rows, candidates):
    return torch.randn(rows, WIDTH), random_offsets(segments, rows)


def _on_rows(values, offsets, layer):
    out = layer((values, offsets))
    return out[0] if isinstance(out, tuple) else out


def _with_targets(values, offsets, layer):
    return layer((values, offsets), offsets.diff() // 3)[0]


HSTU = jm.HSTUConfig(scaling_seqlen=100)
LAYERS = {
    "JaggedTargetAttention": (
        lambda device: jm.JaggedTargetAttention(WIDTH, HEADS, device=device),
        lambda segments, rows, n: (
            torch.randn(n, WIDTH),
            *_rows_inputs(segments, rows, n),
            random_offsets(segments, n),
        ),
        _with_candidates,
    ),
    "JaggedDINAttention": (
        lambda device: jm.JaggedDINAttention(WIDTH, (20, 9), "dice", device=device),
        lambda segments, rows, n: (
            torch.randn(n, WIDTH),
            *_rows_inputs(segments, rows, n),
            random_offsets(segments, n),
        ),
        _with_candidates,
    ),
    "JaggedGDPA": (
        lambda device: jm.JaggedGDPA(WIDTH, HEADS, device=device),
        _rows_inputs,
        _on_rows,
    ),
    "JaggedGDPA-seeds": (
        lambda device: jm.JaggedGDPA(
            WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=3, qk_norm=True), device=device
        ),
        _rows_inputs,
        _on_rows,
    ),
    "GDPABlock-weights": (
        lambda device: jm.GDPABlock(
            WIDTH, HEADS, config=jm.GDPAConfig(num_weights=3), device=device
        ),
        _rows_inputs,
        _on_rows,
    ),
    "HSTULayer": (
        lambda device: jm.HSTULayer(WIDTH, HEADS, HSTU, device=device),
        _rows_inputs,
        _with_targets,
    ),
    "HSTUStack": (
        lambda device: jm.HSTUStack(WIDTH, HEADS, 2, HSTU, device=device),
        _rows_inputs,
        _with_targets,
    ),
    "BlockDiagonalSelfAttention": (
        lambda device: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, max_seqlen=100, device=device),
        _rows_inputs,
        _on_rows,
    ),
    "LinearCompressEmbedding": (
        lambda device: jm.LinearCompressEmbedding(10, 16, 9, device=device),
        lambda *sizes: _compress_inputs(*sizes)[2:],
        lambda users, candidates, index, layer: layer(candidates, users, index),
    ),
    "JaggedMLP": (
        lambda device: jm.JaggedMLP([WIDTH, 40, 8], device=device),
        _rows_inputs,
        _on_rows,
    ),
    "JaggedEncoderLayer": (
        lambda device: jm.JaggedEncoderLayer(WIDTH, HEADS, 40, activation="gelu", device=device),
        _rows_inputs,
        _on_rows,
    ),
}


def compiled(function, backend="aot_eager"):
    """(the function compiled as one graph with symbolic sizes, the counter of compilations)."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    return torch.compile(function, fullgraph=True, dynamic=True, backend=counter), counter


def on_device(inputs, device, dtype=None) -> list:
    """Tensors and plans on a device, floating-point tensors in a dtype."""
    moved = [x.to(device) for x in inputs]
    return [x.to(dtype) if dtype and _is_differentiable(x) else x for x in moved]


def assert_compiles_once(
    function, batches, parameters=(), backend="aot_eager", tolerance=1e-5
) -> None:
    """Check that one graph serves all batches, with eager mode's values and gradients of every
    floating-point input and parameter.

    tolerance: times the largest element; eager mode may use the same kernels with other tile sizes.
    """
    graph, counter = compiled(function, backend)
    compilations = []
    for inputs in batches:
        results = []
        for call in (function, graph):
            leaves = [x.detach().requires_grad_() if _is_differentiable(x) else x for x in inputs]
            out = call(*leaves)
            results.append(
                [
                    out,
                    *torch.autograd.grad(
                        out.square().sum(), [*parameters, *filter(_is_differentiable, leaves)]
                    ),
                ]
            )
        for expected, actual in zip(*results, strict=True):
            assert (actual - expected).abs().max() <= tolerance * expected.abs().max()
        compilations.append(counter.frame_count)
    # Later batches compile nothing. The first may take two attempts: a float of a module, such as
    # dropout's p, begins as a symbol.
    assert set(compilations) == {compilations[0]} and compilations[0] in (1, 2)


def _is_differentiable(x) -> bool:
    return isinstance(x, torch.Tensor) and x.is_floating_point()
