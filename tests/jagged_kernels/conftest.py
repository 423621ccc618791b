"""The checks that interpreter and GPU tests share."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import accuracy
import pytest
import torch
from space import MASKS

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.activations import POINTWISE

LENGTHS = {  # query and key lengths of the segments
    "mixed": ([3, 0, 1, 70, 5, 130, 17, 9, 0, 257, 128], [5, 4, 0, 100, 33, 64, 16, 1, 0, 300, 129]),
    "empty-ends": ([0, 0, 64, 0, 1, 0], [0, 3, 64, 0, 65, 7]),
    "no-keys": ([4, 130], [0, 0]),
    "no-queries": ([0, 0], [4, 130]),
    "skewed": ([1] * 12 + [300], [2] * 12 + [500]),
    "nothing": ([0], [0]),
    "two-lists": ([3, 0, 70, 17, 130, 9, 64, 33, 1, 0, 257, 0], [5, 100, 64, 0, 129, 1]),
    "three-lists": ([0, 3, 0, 70, 129, 0, 0, 200, 1, 5, 66, 128], [7, 0, 140, 65]),
    "lists-of-one-segment": ([1, 0, 65, 140], [131]),
}


@pytest.fixture
def record_cell(record_property):
    """Notes what a test looks at, for the matrix of `make test-gpu`; of head dims the larger."""

    def record(operator, dtype, dims, *options):
        names = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
        record_property("cell", f"{operator}|{names[dtype]}|D{max(*dims, 1)}|{' '.join(filter(None, options)) or 'plain'}")

    return record


@pytest.fixture
def check_activation():
    """The device function's value and derivative against torch's in fp64, over [-30, 30] and at 0, with scales of the score."""
    import triton
    import triton.language as tl
    from jagged_kernels.activations import activation_factors, activation_function

    @triton.jit
    def kernel(score_ptr, value_ptr, slope_ptr, scale, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
        lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value, slope = FUNCTION(tl.load(score_ptr + lanes), scale)
        tl.store(value_ptr + lanes, value)
        tl.store(slope_ptr + lanes, slope)

    def check(name, bfloat16, device):
        # Exponentials of fp32 are off by some ulps; what bfloat16 takes, by at most half of its rounding.
        error = torch.finfo(torch.bfloat16).eps / 2 if bfloat16 else 32 * torch.finfo(torch.float32).eps
        x = torch.cat([torch.linspace(-30, 30, 16383), torch.zeros(1)]).to(device)
        exact = x.double().requires_grad_()
        expected = POINTWISE[name].function(exact)
        (expected_slope,) = torch.autograd.grad(expected.sum(), exact)
        for scale in (1.0, 0.25):
            value, slope = torch.empty(2, len(x), device=device)
            function = activation_function(name, bfloat16)
            kernel[(16,)](x / scale, value, slope, scale, FUNCTION=function, BLOCK=1024)
            factors = activation_factors(name, bfloat16, scale)
            for actual, truth, factor in ((value, expected, factors[0]), (slope, expected_slope, factors[1])):
                size = x.abs().clamp(min=1) * truth.abs().clamp(min=1)
                assert ((actual.double() * factor - truth).abs() <= error * size).all(), name

    return check


@pytest.fixture
def check_tile_list(offsets):
    """The list built on the device is the host's, for segments of both kinds of offsets, few and many; `lists` of the tiled side and of the
    other."""
    from jagged_kernels.tile_list import tile_list
    from jagged_kernels.tile_schedule import tile_capacity, zigzag_schedule

    def check(num_segments, longest, dtype, device, sizes, masked=False, key_tiles=False, lists=(1, 1)):
        lengths = [torch.randint(0, longest + 1, (n * num_segments,)).tolist() for n in lists]
        targets = torch.tensor(lengths[0 if key_tiles else 1], dtype=torch.int64) // 3
        mask = jm.AttentionMask(causal=True, num_targets=targets, contextual_seqlen=2, max_attn_len=40) if masked else None
        expected = zigzag_schedule(*lengths, **sizes, num_workers=1, mask=mask, key_tiles=key_tiles)
        both = (offsets(x, device).to(dtype) for x in lengths)
        options = (mask.spec, targets.to(device)) if masked else (None, None)
        tiles, num_tiles = tile_list(*both, sum(lengths[0]), *sizes.values(), *options, key_tiles)
        assert tiles.dtype == num_tiles.dtype == torch.int32 and num_tiles.shape == (1,)
        assert len(tiles) == tile_capacity(sum(lengths[0]), len(lengths[0]), sizes["num_heads"], sizes["block_m"]) >= int(num_tiles)
        assert torch.equal(tiles[: int(num_tiles)].cpu(), expected.tiles)

    return check


@pytest.fixture
def check_one_key(poisoned_memory, assert_one_key):
    def check(dtype, device, dim=24, kernels="triton"):
        assert_one_key(partial(F.jagged_attention, implementation=kernels), [1, 3, 1], dtype, device, dim)

    return check


@pytest.fixture
def check_empty_shared_operands(poisoned_memory, offsets):
    """No shared rows, or no segment to share them: results without rows or of zeros, gradients of the operands' shapes."""

    def check(device, dim=8, dtype=torch.float32, kernels="triton"):
        some = offsets([3, 2], device)
        cases = ("shared", some, 0, 5, 0), (some, "shared", 5, 0, 5), ("shared", some[:1], 4, 0, 0)
        for q_offsets, kv_offsets, q_rows, kv_rows, out_rows in cases:
            q, k, v = (torch.randn(n, 2, dim, device=device, dtype=dtype, requires_grad=True) for n in (q_rows, kv_rows, kv_rows))
            out = F.jagged_attention(q, k, v, q_offsets, kv_offsets, implementation=kernels)
            assert out.shape == (out_rows, 2, dim) and not out.any()
            for x, gradient in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
                assert gradient.shape == x.shape and not gradient.any()

    return check


@pytest.fixture
def offsets(offsets_of):
    """lengths, device -> offsets `[B + 1]`."""
    return lambda lengths, device="cpu": offsets_of(lengths).to(device)


@pytest.fixture
def poisoned_memory():
    """torch.empty gives NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def check_attention(poisoned_memory, offsets, record_cell):
    """Hold an implementation, forward and every gradient, to the accuracy rule."""

    def check(
        lengths, dtype, device, heads=(4, 2), dims=(24, 40), shared=None, tensors=None, grad=None, kernels="triton", **options
    ):  # fmt: skip
        q_lengths, kv_lengths = LENGTHS[lengths] if isinstance(lengths, str) else lengths
        q_offsets = "shared" if shared == "q" else offsets(q_lengths, device)
        kv_offsets = "shared" if shared == "kv" else offsets(kv_lengths, device)
        rows = 37 if shared == "q" else sum(q_lengths), 53 if shared == "kv" else sum(kv_lengths)
        if tensors is None:
            shapes = (rows[0], heads[0], dims[0]), (rows[1], heads[1], dims[0]), (rows[1], heads[1], dims[1])
            tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        schedule = options.pop("schedule", None)
        mask = options.get("mask")
        record_cell(
            f"attention {kernels}", dtype, (tensors[0].shape[2], tensors[2].shape[2]), options.get("activation", "softmax"),
            shared and f"shared {shared}", mask if isinstance(mask, str) else mask and "mask",
        )  # fmt: skip
        if isinstance(options.get("mask"), str):
            fields = dict(MASKS[options["mask"]])
            if "num_targets" in fields:  # from none to all of a segment
                longest = torch.tensor(kv_lengths).clamp(max=fields["num_targets"])
                fields["num_targets"] = (longest * torch.rand(len(kv_lengths)) * 1.2).long().clamp(max=longest).to(device)
            options["mask"] = jm.AttentionMask(**fields)

        def operator(*tensors):
            return F.jagged_attention(*tensors, q_offsets, kv_offsets, implementation=kernels, schedule=schedule, **options)

        grad = None if grad is None else grad(operator(*tensors))
        actual, do = accuracy.results(operator, dict(zip("qkv", tensors)), grad)
        accuracy.assert_accurate(actual, accuracy.attention(*tensors, do, q_offsets, kv_offsets, **options))

    return check


@pytest.fixture
def check_self_target_attention(poisoned_memory, offsets, record_cell):
    """One call for users' rows and their candidates, held to the accuracy rule; rows read in place or copied give the same bits."""

    def check(lengths, candidates, dtype, device, heads=(4, 2), dim=24, kernels="triton", **options):
        record_cell(f"self-target attention {kernels}", dtype, (dim, dim), options.get("activation", "softmax"))
        segments, of_candidates, rows = offsets(lengths, device), offsets(candidates, device), [sum(lengths), sum(candidates)]
        q, k, v = (torch.randn(n, h, dim, device=device).to(dtype) for n, h in zip((sum(rows), rows[0], rows[0]), (*heads, heads[1])))

        def operator(q, k, v, place=lambda x: x):
            parts = map(place, q.split(rows))
            return torch.cat(F.self_target_attention(*parts, k, v, segments, of_candidates, implementation=kernels, **options))

        actual, do = accuracy.results(operator, dict(q=q, k=k, v=v))
        q_offsets = torch.cat([segments, of_candidates[1:] + rows[0]])
        accuracy.assert_accurate(actual, accuracy.attention(q, k, v, do, q_offsets, segments, **options))
        assert torch.equal(operator(q, k, v), operator(q, k, v, torch.clone))

    return check


@pytest.fixture
def check_scales_with_a_gradient(offsets):
    """An output_scale for each segment that requires a gradient; shared: "q", "kv", "lists" of queries that read the same keys, "none"."""

    def check(shared, dtype, device, kernels, repeats=1):
        queries, keys = [70, 0, 3, 530, 1, 64] * repeats, ([65, 130, 5] if shared == "lists" else [5, 70, 0, 128, 64, 1]) * repeats
        q_offsets = "shared" if shared == "q" else offsets(queries, device)
        kv_offsets = "shared" if shared == "kv" else offsets(keys, device)
        rows = 32 if shared == "q" else sum(queries), *[40 if shared == "kv" else sum(keys)] * 2
        q, k, v = (torch.randn(n, 2, 64, device=device).to(dtype) for n in rows)
        scales = torch.tensor([0.5, 2.0, -3.0, 0.1, 1.0, 0.02] * repeats, device=device).to(dtype)

        def attend(q, k, v, scales):
            return F.jagged_attention(q, k, v, q_offsets, kv_offsets, activation="silu", output_scale=scales, implementation=kernels)

        actual, do = accuracy.results(attend, dict(q=q, k=k, v=v, output_scale=scales))
        options = dict(activation="silu", output_scale=scales.requires_grad_())
        accuracy.assert_accurate(actual, accuracy.attention(q, k, v, do, q_offsets, kv_offsets, **options))

    return check


@pytest.fixture
def compress_inputs():
    """Random weights, embeddings and indices; `batches` and `depths` (K) of the levels, coarsest first."""

    def make(batches, depths, num_compressed, width, dtype, device, grouped=False):
        weights = [(torch.randn(num_compressed, k, device=device) * max(k, 1) ** -0.5).to(dtype) for k in depths]
        embeddings = [torch.randn(b, k, width, device=device).to(dtype) for b, k in zip(batches, depths)]
        indices = [torch.randint(0, max(b, 1), (batches[-1],), device=device) for b in batches[:-1]]
        if grouped:
            indices = [jm.CandidateIndex.from_counts(torch.bincount(x.cpu(), minlength=b)).to(device) for x, b in zip(indices, batches)]
        return weights, embeddings, indices

    return make


@pytest.fixture
def check_linear_compress(poisoned_memory, compress_inputs, record_cell):
    """Hold an implementation, forward and every gradient, to the accuracy rule."""

    def check(batches, depths, num_compressed, width, dtype, device, grouped=False, change=None, grad=None, kernels="fused"):
        option = f"{len(depths)} level{'s' if len(depths) > 1 else ''}"
        record_cell(f"linear_compress {kernels}", dtype, (width, 1), option, "grouped" if grouped else None)
        weights, embeddings, indices = compress_inputs(batches, depths, num_compressed, width, dtype, device, grouped)
        if change is not None:
            weights, embeddings = ([change(x) for x in tensors] for tensors in (weights, embeddings))

        def run(*x):
            return F.linear_compress(x[: len(x) // 2], x[len(x) // 2 :], indices, implementation=kernels)

        levels = {f"weights[{i}]": x for i, x in enumerate(weights)} | {f"embeddings[{i}]": x for i, x in enumerate(embeddings)}
        grad = None if grad is None else grad(run(*levels.values()))
        actual, do = accuracy.results(run, levels, grad)
        maps = [x.candidate_to_user if isinstance(x, jm.CandidateIndex) else x for x in indices]
        accuracy.assert_accurate(actual, accuracy.linear_compress(weights, embeddings, maps, do))

    return check


@pytest.fixture
def check_block_attention(poisoned_memory, offsets, record_cell):
    """Hold an implementation, forward and every gradient, to the accuracy rule."""

    def check(
        lengths, dtype, device, block_size=64, heads=(4, 2), dim=24, rotate=None, positions=None, linear=True, precise=False,
        tensors=None, grad=None, kernels="triton", **options,
    ):  # fmt: skip
        segments = offsets(lengths, device)
        if tensors is None:
            shapes = [(sum(lengths), number, dim) for number in (heads[0], heads[1], heads[1])]
            tensors = [torch.randn(shape, device=device).to(dtype) for shape in shapes]
        option = "plain" if rotate is None else f"rotary {rotate}{'' if linear else ' table'}{' precise' if precise else ''}"
        record_cell(f"block_attention {kernels}", dtype, (tensors[0].shape[2], 1), f"blocks of {block_size}", option)
        if rotate is not None:
            tables = jm.Rotary.from_frequencies(tensors[0].shape[2], max(max(lengths, default=0), 1), rotate, device=device)
            options["rotary"] = jm.Rotary(tables.cos, tables.sin, rotate, positions, linear, precise)

        def run(*tensors):
            return F.block_diagonal_attention(*tensors, segments, block_size=block_size, implementation=kernels, **options)

        grad = None if grad is None else grad(run(*tensors))
        actual, do = accuracy.results(run, dict(zip("qkv", tensors)), grad)
        bounds = accuracy.block_attention(
            *tensors, do, segments, block_size=block_size, precise=precise and kernels == "hopper", **options
        )  # fmt: skip
        accuracy.assert_accurate(actual, bounds)

    return check


@pytest.fixture
def check_packed_block_attention(poisoned_memory, offsets, record_cell):
    """q, k and v in one tensor: the results of three, bit for bit, and within the accuracy rule. Not `linear`: angles of no order."""

    def check(lengths, dtype, device, block_size=64, heads=2, dim=24, rotate=None, linear=True, qkv=None, grad=None, kernels="triton"):
        segments = offsets(lengths, device)
        qkv = torch.randn(sum(lengths), 3, heads, dim, device=device).to(dtype) if qkv is None else qkv
        record_cell(f"block_attention {kernels}", dtype, (qkv.shape[3], 1), "packed", rotate and f"rotary {rotate}")
        rows, rotary = max(max(lengths, default=0), 1), None
        if rotate is not None and linear:
            rotary = jm.Rotary.from_frequencies(qkv.shape[3], rows, rotate, device=device)
        elif rotate is not None:
            angles = 6 * torch.rand(rows, qkv.shape[3] // 2, device=device)
            rotary = jm.Rotary(angles.cos(), angles.sin(), rotate)
        options = dict(block_size=block_size, rotary=rotary)

        def packed(qkv):
            return F.block_diagonal_attention_packed(qkv, segments, implementation=kernels, **options)

        leaf = qkv.detach().requires_grad_()
        outputs = packed(leaf), F.block_diagonal_attention(*leaf.unbind(1), segments, implementation=kernels, **options)
        grad = torch.randn_like(outputs[0]) if grad is None else grad(outputs[0])
        gradients = [torch.autograd.grad(out, leaf, grad)[0] for out in outputs]
        assert torch.equal(*outputs) and torch.equal(*gradients)
        actual = {"out": outputs[0], **dict(zip(("dq", "dk", "dv"), gradients[0].unbind(1)))}
        accuracy.assert_accurate(actual, accuracy.block_attention(*qkv.unbind(1), grad, segments, **options))

    return check


def _split(x, offsets):
    return [x[start:end] for start, end in zip(offsets.tolist(), offsets.tolist()[1:])]


def _join(parts, empty):
    return torch.cat([*parts, empty])


PAIRS = {  # lengths of the segments of x and of y
    "mixed": ([3, 0, 1, 70, 5, 130, 17, 9], [5, 4, 0, 100, 33, 65, 16, 1]),
    "empty-ends": ([0, 0, 64, 0, 1, 0], [0, 3, 64, 0, 65, 7]),
    "skewed": ([1] * 9 + [140, 2], [2] * 9 + [130, 1]),
    "no-columns": ([4, 130], [0, 0]),
    "no-rows": ([0, 0], [4, 130]),
    "nothing": ([0], [0]),
    "no-segments": ([], []),
}


class JaggedCase(NamedTuple):
    """An operator, its definition segment by segment, tensors for both, their names, and the operator's bounds: tensors, do → bounds."""

    operator: Callable[..., torch.Tensor]
    definition: Callable[..., torch.Tensor]
    tensors: list[torch.Tensor]
    names: tuple[str, ...]
    bounds: Callable[..., dict[str, accuracy.Bound]]

    def check(self, tensors=None, grad=None):
        """Hold the operator, forward and every gradient, to the accuracy rule; with other tensors than its own if there are any."""
        tensors = self.tensors if tensors is None else tensors
        actual, do = accuracy.results(self.operator, dict(zip(self.names, tensors)), grad)
        accuracy.assert_accurate(actual, self.bounds(*tensors, do))


@pytest.fixture
def jagged_pair(offsets):
    """lengths of both → offsets of x, of y and of the matrices p, and the sizes of all three."""

    def make(lengths, device):
        x_lengths, y_lengths = PAIRS[lengths] if isinstance(lengths, str) else lengths
        p_lengths = [n * m for n, m in zip(x_lengths, y_lengths)]
        every = x_lengths, y_lengths, p_lengths
        return [offsets(x, device) for x in every], [sum(x) for x in every]

    return make


@pytest.fixture
def jagged_products(jagged_pair):
    """Name → JaggedCase, for lengths of both, columns D of x and y, and T of dense y."""
    from jagged_kernels import jagged_matmul as jagged

    def make(name, lengths, dtype, device, depth=20, columns=9):
        offsets, (x_rows, y_rows, total) = jagged_pair(lengths, device)
        x_offsets, y_offsets, p_offsets = offsets
        num_segments = len(x_offsets) - 1

        def normal(*shape, scale=1.0):
            return (torch.randn(shape, device=device) * scale).to(dtype)

        def matrices(p):
            sizes = zip(x_offsets.diff().tolist(), y_offsets.diff().tolist())
            return [part.view(size) for part, size in zip(_split(p, p_offsets), sizes)]

        def dense(activation=None, with_bias=True):
            def operator(x, y, *bias):
                return jagged.triton_jagged_dense_bmm(x, x_offsets, y, bias[0] if bias else None, activation)

            def reference(x, y, *bias):
                products = [a @ b for a, b in zip(_split(x, x_offsets), y)]
                products = [a + b for a, b in zip(products, bias[0])] if bias else products
                out = _join(products, x.sum().expand(0, y.shape[2]))
                return out if activation is None else POINTWISE[activation].function(out)

            def bounds(x, y, *rest):
                *bias, do = rest
                return accuracy.jagged_dense_bmm(x, y, x_offsets, do, bias=bias[0] if bias else None, activation=activation)

            tensors = [normal(x_rows, depth), normal(num_segments, depth, columns, scale=max(depth, 1) ** -0.5)]
            tensors += [normal(num_segments, columns)] if with_bias else []
            return JaggedCase(operator, reference, tensors, ("x", "y", "bias")[: len(tensors)], bounds)

        if name == "dense":
            return dense(with_bias=False)
        if name == "dense-bias":
            return dense()
        if name.startswith("dense-"):
            return dense(name.removeprefix("dense-"))
        if name == "jagged":
            return JaggedCase(
                lambda x, y: jagged.triton_jagged_jagged_bmm(x, y, x_offsets),
                lambda x, y: (
                    torch.stack([a.T @ b for a, b in zip(_split(x, x_offsets), _split(y, x_offsets))])
                    if num_segments
                    else (x.sum() + y.sum()).expand(0, depth, columns)
                ),
                [normal(x_rows, depth), normal(x_rows, columns)],
                ("x", "y"),
                lambda x, y, do: accuracy.jagged_jagged_bmm(x, y, x_offsets, do),
            )
        if name == "sum":
            return JaggedCase(
                lambda x: jagged.triton_jagged_sum(x, x_offsets),
                lambda x: torch.stack([a.sum(0) for a in _split(x, x_offsets)]) if num_segments else x,
                [normal(x_rows, columns)],
                ("x",),
                lambda x, do: accuracy.jagged_sum(x, x_offsets, do),
            )
        if name == "outer":
            return JaggedCase(
                lambda x, y: jagged.triton_jagged_outer(x, y, *offsets, total),
                lambda x, y: _join(
                    [(a @ b.T).flatten() for a, b in zip(_split(x, x_offsets), _split(y, y_offsets))], (x.sum() + y.sum()).expand(0)
                ),
                [normal(x_rows, depth), normal(y_rows, depth)],
                ("x", "y"),
                lambda x, y, do: accuracy.jagged_outer(x, y, *offsets, do),
            )
        if name == "gram":
            squares = torch.cat([p_offsets.new_zeros(1), (x_offsets.diff().long() ** 2).cumsum(0)])
            elements = int(squares[-1])
            return JaggedCase(
                lambda x: jagged.triton_jagged_gram(x, x_offsets, squares, elements),
                lambda x: _join([(a @ a.T).flatten() for a in _split(x, x_offsets)], x.sum().expand(0)),
                [normal(x_rows, depth)],
                ("x",),
                lambda x, do: accuracy.jagged_gram(x, x_offsets, squares, do),
            )
        if name == "array":
            return JaggedCase(
                lambda p, y: jagged.triton_array_jagged_bmm(p, y, *offsets, x_rows, False),
                lambda p, y: _join([a @ b for a, b in zip(matrices(p), _split(y, y_offsets))], y[:0]),
                [normal(total), normal(y_rows, depth)],
                ("p", "y"),
                lambda p, y, do: accuracy.array_jagged_bmm(p, y, *offsets, do),
            )
        assert name == "array-transposed"
        return JaggedCase(
            lambda p, y: jagged.triton_array_jagged_bmm(p, y, *offsets, y_rows, True),
            lambda p, y: _join([a.T @ b for a, b in zip(matrices(p), _split(y, x_offsets))], y[:0]),
            [normal(total), normal(x_rows, depth)],
            ("p", "y"),
            lambda p, y, do: accuracy.array_jagged_bmm(p, y, *offsets, do, transposed=True),
        )

    return make


@pytest.fixture
def jagged_softmaxes(jagged_pair):
    """Name → JaggedCase."""
    from jagged_kernels import jagged_softmax as jagged

    def make(name, lengths, dtype, device, columns=9):
        offsets, (x_rows, y_rows, total) = jagged_pair(lengths, device)
        x_offsets, y_offsets, p_offsets = offsets
        if name == "softmax":
            return JaggedCase(
                lambda x: jagged.triton_jagged_softmax(x, x_offsets),
                lambda x: _join([a.softmax(0) for a in _split(x, x_offsets)], x[:0]),
                [(3 * torch.randn(x_rows, columns, device=device)).to(dtype)],
                ("x",),
                lambda x, do: accuracy.jagged_softmax(x, x_offsets, do),
            )
        over_columns = {"rows": False, "columns": True}[name]

        def reference(p):
            sizes = zip(x_offsets.diff().tolist(), y_offsets.diff().tolist())
            parts = [a.view(size).softmax(0 if over_columns else 1) for a, size in zip(_split(p, p_offsets), sizes)]
            return _join([a.flatten() for a in parts], p[:0])

        p = (3 * torch.randn(total, device=device)).to(dtype)
        lines = y_rows if over_columns else x_rows
        return JaggedCase(
            lambda p: jagged.triton_jagged2_softmax(p, *offsets, lines, over_columns),
            reference,
            [p],
            ("p",),
            lambda p, do: accuracy.jagged2_softmax(p, *offsets, do, dim=-2 if over_columns else -1),
        )

    return make


@pytest.fixture
def assert_neighbours_kept():
    """A NaN in the rows of one segment changes nothing in the results of the others: `touched(out)` marks what it may reach."""

    def check(operator, tensors, spoil, touched):
        clean = operator(*tensors)
        spoiled = operator(*(spoil(x.clone()) for x in tensors))
        mask = touched(clean)
        assert torch.equal(clean[~mask], spoiled[~mask]) and spoiled[mask].isnan().any()

    return check


@pytest.fixture
def assert_no_synchronisation():
    """A step may wait for the device the first time, when it is compiled, and never again."""

    def check(step):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return check


@pytest.fixture
def assert_second_derivatives():
    """Of every first gradient by every operand and by the gradient that it was made from."""

    def check(operator, reference, tensors, **tolerance):
        grad = torch.randn_like(reference(*tensors))
        weights = [torch.randn_like(x) for x in tensors]

        def second(function):
            inputs = [x.clone().requires_grad_() for x in (*tensors, grad)]
            first = torch.autograd.grad(function(*inputs[:-1]), inputs[:-1], inputs[-1], create_graph=True)
            return torch.autograd.grad(sum((x * w).sum() for x, w in zip(first, weights)), inputs, materialize_grads=True)

        for actual, expected in zip(second(operator), second(reference), strict=True):
            torch.testing.assert_close(actual, expected, **tolerance)

    return check


@pytest.fixture
def check_places(offsets):
    """Places of score gradients are the running sums of a segment's blocks, as far as there is room."""

    def check(capacity, query_block, device):
        from jagged_kernels.hopper.attention_score_gradients import find_places

        queries, keys = (torch.randint(0, 300, (1500,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(2))
        blocks = torch.tensor([-(-q // query_block) * (query_block // 64) * -(-k // 64) * 3 for q, k in zip(queries, keys)])
        ends = blocks.cumsum(0)
        num_tiles = torch.tensor([77], dtype=torch.int32, device=device)
        places, others = find_places(offsets(queries, device), offsets(keys, device), num_tiles, capacity, 3, query_block)
        assert places.tolist() == torch.where(ends <= capacity, ends - blocks, -1).tolist()
        assert others.item() == (77 if ends[-1] > capacity else 0)

    return check


@pytest.fixture
def check_delta():
    """rowsum(dO ∘ O), of contiguous rows and of a gradient of other strides."""

    def check(dtype, device):
        from jagged_kernels.hopper.attention_score_gradients import write_delta

        out = torch.randn(150, 3, 40, device=device).to(dtype)
        for do in (torch.randn_like(out), torch.randn(3, 150, 48, device=device).to(dtype).transpose(0, 1)[..., :40]):
            delta = torch.full((3, 150), float("nan"), device=device)
            write_delta(do, out, delta)
            torch.testing.assert_close(delta, (do.double() * out.double()).sum(-1).T.float(), rtol=1e-5, atol=1e-5)

    return check
