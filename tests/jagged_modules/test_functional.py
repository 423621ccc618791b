"""F.jagged_attention on the CPU against the reference: shapes, layouts, dtypes, autograd."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.reference import attention_reference

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def make_qkv(q_rows, kv_rows, heads=2, kv_heads=None, dim=8, v_dim=None, dtype=torch.float32):
    kv_heads = kv_heads or heads
    shapes = (q_rows, heads, dim), (kv_rows, kv_heads, dim), (kv_rows, kv_heads, v_dim or dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check_against_reference(assert_accurate, q, k, v, q_offsets, kv_offsets, scale=None, grad=None, **options):
    """Operator and reference on the same inputs, "shared" operands replicated for the reference."""
    exact_scale = q.shape[-1] ** -0.5 if scale is None else scale

    def reference(q, k, v):
        q_rows, kv_rows = q_offsets, q_offsets if kv_offsets is None else kv_offsets
        if q_rows == "shared":
            q, q_rows = q.repeat(len(kv_rows) - 1, 1, 1), torch.arange(len(kv_rows)) * len(q)
        if kv_rows == "shared":
            segments = len(q_rows) - 1
            kv_rows, k, v = torch.arange(segments + 1) * len(k), k.repeat(segments, 1, 1), v.repeat(segments, 1, 1)
        return attention_reference(q, k, v, q_rows, kv_rows, scale=exact_scale)

    def operator(q, k, v):
        return F.jagged_attention(q, k, v, q_offsets, kv_offsets, scale=scale, **options)

    assert_accurate(operator, reference, q, k, v, grad=grad)


LENGTHS = {
    "equal": ([4, 4, 4], [4, 4, 4]),
    "one-row": ([1, 1, 1], [1, 1, 1]),
    "odd": ([3, 7, 13], [5, 11, 1]),
    "empty-queries": ([0, 6, 0], [3, 4, 2]),
    "empty-keys": ([2, 6, 3], [0, 4, 0]),
    "empty-both": ([0, 0], [0, 0]),
    "skewed": ([1, 700, 2], [900, 3, 1]),
    "many": ([5, 2, 0, 9] * 30, [1, 8, 3, 0] * 30),
    "no-segments": ([], []),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_segments(lengths, dtype, assert_accurate, offsets_of):
    q_lengths, kv_lengths = LENGTHS[lengths]
    tensors = make_qkv(sum(q_lengths), sum(kv_lengths), dtype=DTYPES[dtype])
    check_against_reference(assert_accurate, *tensors, offsets_of(q_lengths), offsets_of(kv_lengths))


@pytest.mark.parametrize("dim, v_dim", [(1, 1), (8, 8), (24, 40), (40, 24), (72, 72), (17, 33), (128, 64), (200, 8), (256, 256)])
def test_head_dims(dim, v_dim, assert_accurate, offsets_of):
    tensors = make_qkv(15, 12, dim=dim, v_dim=v_dim)
    check_against_reference(assert_accurate, *tensors, offsets_of([5, 0, 10]), offsets_of([7, 2, 3]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("heads, kv_heads", [(1, 1), (4, 2), (6, 2), (5, 1)])
def test_grouped_heads(heads, kv_heads, dtype, assert_accurate, offsets_of):
    tensors = make_qkv(20, 31, heads, kv_heads, v_dim=16, dtype=DTYPES[dtype])
    check_against_reference(assert_accurate, *tensors, offsets_of([9, 11]), offsets_of([30, 1]))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kv_lengths", [[3, 9, 1], [2, 0, 5], [0], []])
def test_shared_queries(kv_lengths, dtype, assert_accurate, offsets_of):
    tensors = make_qkv(3, sum(kv_lengths), heads=4, kv_heads=2, dtype=DTYPES[dtype])
    check_against_reference(assert_accurate, *tensors, "shared", offsets_of(kv_lengths))


@pytest.mark.parametrize("q_lengths", [[3, 9, 1], [2, 0, 5], [0], []])
def test_shared_keys(q_lengths, assert_accurate, offsets_of):
    tensors = make_qkv(sum(q_lengths), 6, heads=4, kv_heads=2)
    check_against_reference(assert_accurate, *tensors, offsets_of(q_lengths), "shared")


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1.0, 10.0])
def test_scale(scale, assert_accurate, offsets_of):
    check_against_reference(assert_accurate, *make_qkv(12, 12), offsets_of([5, 7]), None, scale=scale)


@pytest.mark.parametrize("scale", [-1e4, 1e4])
def test_scores_far_outside_the_exponentials_range(scale, offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(12, 12))
    out = F.jagged_attention(q, k, v, offsets_of([5, 7]), scale=scale)
    exact = F.jagged_attention(*(x.double() for x in (q, k, v)), offsets_of([5, 7]), scale=scale, implementation="reference")
    torch.testing.assert_close(out, exact.float())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offset_dtypes_give_the_same(dtype, offsets_of):
    q, k, v = make_qkv(9, 6)
    expected = F.jagged_attention(q, k, v, offsets_of([4, 5]), offsets_of([0, 6]))
    assert torch.equal(F.jagged_attention(q, k, v, offsets_of([4, 5], dtype), offsets_of([0, 6], dtype)), expected)


def test_a_bound_on_the_lengths_changes_nothing(offsets_of):
    q, k, v = make_qkv(9, 9)
    expected = F.jagged_attention(q, k, v, offsets_of([4, 5]))
    assert torch.equal(F.jagged_attention(q, k, v, offsets_of([4, 5]), max_seqlen_q=5, max_seqlen_kv=100), expected)


def test_packed_projection_is_read_in_place(assert_accurate, offsets_of):
    packed = torch.randn(14, 3, 2, 8)
    check_against_reference(assert_accurate, *packed.unbind(1), offsets_of([9, 5]), None)


def test_any_strides(assert_accurate, offsets_of):
    q = torch.randn(2, 14, 8).transpose(0, 1)
    k = torch.randn(14, 8, 2).transpose(1, 2)
    v = torch.randn(28, 4, 16)[::2, ::2, ::2]
    check_against_reference(assert_accurate, q, k, v, offsets_of([9, 5]), None)


@pytest.mark.parametrize("grad", [torch.tensor(0.5).expand(14, 2, 8), torch.randn(8, 2, 14).permute(2, 1, 0)], ids=["expanded", "permuted"])
def test_gradients_of_any_strides(grad, assert_accurate, offsets_of):
    check_against_reference(assert_accurate, *make_qkv(14, 14), offsets_of([9, 5]), None, grad=grad)


@pytest.mark.parametrize("lengths", [[9, 9, 6, 9], [1, 300, 2, 290]])
def test_nan_in_a_segment_stays_there(lengths, offsets_of):
    """Values and gradients of the others are as without it, of segments of equal length too, computed in one call."""
    offsets, total = offsets_of(lengths), sum(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))

    def run(poison):
        torch.manual_seed(1)
        q, k, v, grad = torch.randn(4, total, 2, 8)
        for x in (q, k, v, grad):
            x[rows == 1] += poison
        inputs = [x.requires_grad_() for x in (q, k, v)]
        out = F.jagged_attention(*inputs, offsets)
        return [out, *torch.autograd.grad(out, inputs, grad)]

    for clean, poisoned in zip(run(0.0), run(float("nan")), strict=True):
        assert torch.equal(clean[rows != 1], poisoned[rows != 1])
        assert poisoned[rows == 1].isnan().all()


def test_nan_keys_without_queries_reach_nothing(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(5, 7))
    with torch.no_grad():
        k[:4], v[:4], q[:] = float("nan"), float("nan"), 1.0
    out = F.jagged_attention(q, k, v, offsets_of([0, 5]), offsets_of([4, 3]))
    dq, dk, dv = torch.autograd.grad(out.sum(), [q, k, v])
    assert out.isfinite().all() and dq.isfinite().all()
    assert not dk[:4].any() and not dv[:4].any()


def test_queries_without_keys_get_zero(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(5, 3))
    with torch.no_grad():
        q[:2] = float("nan")
    out = F.jagged_attention(q, k, v, offsets_of([2, 3]), offsets_of([0, 3]))
    assert not out[:2].any()
    dq, _, _ = torch.autograd.grad(out.sum(), [q, k, v])
    assert not dq[:2].any()


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_gradients_of_some_inputs(needed, offsets_of):
    offsets = offsets_of([4, 3])
    tensors = make_qkv(7, 7, dtype=torch.float64)
    grad = torch.randn(7, 2, 8, dtype=torch.float64)

    def gradients(implementation):
        inputs = [x.clone().requires_grad_(i in needed) for i, x in enumerate(tensors)]
        F.jagged_attention(*inputs, offsets, implementation=implementation).backward(grad)
        return [x.grad for x in inputs]

    torch.testing.assert_close(gradients("auto"), gradients("reference"))


def test_the_same_tensor_as_query_key_and_value(offsets_of):
    x = torch.randn(9, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: F.jagged_attention(x, x, x, offsets_of([4, 5])), x)


@pytest.mark.parametrize("q_offsets, kv_offsets", [([0, 2, 2, 5], [0, 4, 6, 6]), ("shared", [0, 3, 6]), ([0, 2, 5], "shared")])
def test_gradcheck(q_offsets, kv_offsets):
    q_offsets, kv_offsets = (x if isinstance(x, str) else torch.tensor(x) for x in (q_offsets, kv_offsets))
    inputs = [x.requires_grad_() for x in make_qkv(5, 6, heads=2, kv_heads=1, dim=3, v_dim=2, dtype=torch.float64)]
    assert torch.autograd.gradcheck(lambda q, k, v: F.jagged_attention(q, k, v, q_offsets, kv_offsets, scale=-0.4), inputs)


def test_two_runs_are_bitwise_equal(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(400, 400)]
    offsets = offsets_of([100, 7, 280, 13])

    def run():
        out = F.jagged_attention(*inputs, offsets)
        return [out, *torch.autograd.grad(out.square().sum(), inputs)]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


def test_work_is_that_of_the_real_rows(offsets_of):
    """Scores computed, counted from the shapes given to torch's fused kernel: every query of a segment with its keys, nothing else."""
    q_lengths, kv_lengths = torch.randint(0, 200, (2, 60)).tolist()
    inputs = [x.requires_grad_() for x in make_qkv(sum(q_lengths), sum(kv_lengths), heads=3)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        F.jagged_attention(*inputs, offsets_of(q_lengths), offsets_of(kv_lengths)).sum().backward()

    def scores(name, q_argument):
        shapes = [event.input_shapes[q_argument : q_argument + 2] for event in profile.events() if event.name == name]
        return sum(q[0] * q[1] * q[2] * k[2] for q, k in shapes)

    real = 3 * sum(n * m for n, m in zip(q_lengths, kv_lengths))
    assert scores("aten::_scaled_dot_product_flash_attention_for_cpu", 0) == real
    assert scores("aten::_scaled_dot_product_flash_attention_for_cpu_backward", 1) == real


@given(data=st.data())
def test_any_lengths_and_heads(data, assert_accurate, offsets_of):
    segments = data.draw(st.integers(0, 6))
    lengths = st.lists(st.integers(0, 40), min_size=segments, max_size=segments)
    q_lengths, kv_lengths = data.draw(lengths), data.draw(lengths)
    kv_heads, group = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    dim, v_dim = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    dtype = data.draw(st.sampled_from(list(DTYPES.values())))
    tensors = make_qkv(sum(q_lengths), sum(kv_lengths), kv_heads * group, kv_heads, dim, v_dim, dtype)
    check_against_reference(assert_accurate, *tensors, offsets_of(q_lengths), offsets_of(kv_lengths))


# -- modes -------------------------------------------------------------------------------------------------------------------


def test_no_grad(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    with torch.no_grad():
        out = F.jagged_attention(q, k, v, offsets_of([4, 3]))
    assert not out.requires_grad
    assert torch.equal(out, F.jagged_attention(q, k, v, offsets_of([4, 3])))


def test_inference_mode(offsets_of):
    with torch.inference_mode():
        assert F.jagged_attention(*make_qkv(7, 7), offsets_of([4, 3])).shape == (7, 2, 8)


@pytest.mark.parametrize("implementation", ["auto", "reference"])
def test_autocast_computes_in_its_dtype(implementation, offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = F.jagged_attention(q, k.half(), v, offsets_of([4, 3]), implementation=implementation)
    assert out.dtype == torch.bfloat16
    expected = F.jagged_attention(*(x.bfloat16() for x in (q, k, v)), offsets_of([4, 3]), implementation=implementation)
    torch.testing.assert_close(out, expected, rtol=0, atol=4 * torch.finfo(torch.bfloat16).eps * float(v.detach().abs().max()))
    out.sum().backward()
    assert q.grad.dtype == k.grad.dtype == v.grad.dtype == torch.float32


def test_autocast_leaves_float64_alone(offsets_of):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert F.jagged_attention(*make_qkv(7, 7, dtype=torch.float64), offsets_of([4, 3])).dtype == torch.float64


def test_second_derivatives_raise(offsets_of):
    q, k, v = (x.requires_grad_() for x in make_qkv(7, 7))
    grads = torch.autograd.grad(F.jagged_attention(q, k, v, offsets_of([4, 3])).sum(), [q, k, v], create_graph=True)
    with pytest.raises(RuntimeError, match="jagged_attention.*twice"):
        sum(g.sum() for g in grads).backward()


def test_the_reference_has_second_derivatives(offsets_of):
    inputs = [x.requires_grad_() for x in make_qkv(4, 4, dim=2, dtype=torch.float64)]
    offsets = offsets_of([3, 1])
    assert torch.autograd.gradgradcheck(lambda *x: F.jagged_attention(*x, offsets, implementation="reference"), inputs)


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_function_transforms_raise(transform, offsets_of):
    x, offsets = torch.randn(2, 7, 2, 4), offsets_of([4, 3])

    def attend(x):
        return F.jagged_attention(x, x, x, offsets)

    with pytest.raises(RuntimeError, match="jagged_attention.*torch.func"):
        if transform == "vmap":
            torch.vmap(attend)(x)
        elif transform == "grad":
            torch.func.grad(lambda x: attend(x).sum())(x[0])
        else:
            torch.func.jvp(attend, (x[0],), (x[1],))


def test_vmap_of_the_reference(offsets_of):
    x, offsets = torch.randn(2, 7, 2, 4), offsets_of([4, 3])
    batched = torch.vmap(lambda x: F.jagged_attention(x, x, x, offsets, implementation="reference"))(x)
    torch.testing.assert_close(batched, torch.stack([F.jagged_attention(x[i], x[i], x[i], offsets) for i in range(2)]))


# -- bad input ---------------------------------------------------------------------------------------------------------------


GOOD = dict(zip("qkv", make_qkv(6, 6))) | dict(q_offsets=torch.tensor([0, 2, 6]))
SMALL_TILES = jm.zigzag_schedule([2, 4], [2, 4], num_heads=2, block_m=8, block_n=16, num_workers=1)
SCHEDULE = jm.zigzag_schedule([2, 4], [2, 4], num_heads=4, block_m=16, block_n=16, num_workers=1)
BAD = [
    (dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    (dict(v=[1.0]), TypeError, "v must be a torch.Tensor, got list"),
    (dict(k=torch.ones(6, 2, 8, dtype=torch.int64)), TypeError, "k must be floating point, got torch.int64"),
    (dict(q=torch.ones(6, 16)), ValueError, r"q must have shape \[Lq, H, D\], got \[6, 16\]"),
    (dict(k=torch.ones(6, 2, 8, 1)), ValueError, r"k must have shape \[Lk, Hkv, D\], got \[6, 2, 8, 1\]"),
    (dict(k=torch.ones(6, 2, 8, dtype=torch.float64)), ValueError, "k must have q's dtype, torch.float32, got torch.float64"),
    (dict(v=torch.ones(6, 2, 8, device="meta")), ValueError, "v must be on q's device, cpu, got meta"),
    (dict(v=torch.ones(5, 2, 8)), ValueError, r"v must have k's rows and heads, \[6, 2\], got \[5, 2\]"),
    (dict(v=torch.ones(6, 1, 8)), ValueError, r"v must have k's rows and heads, \[6, 2\], got \[6, 1\]"),
    (dict(k=torch.ones(6, 2, 4)), ValueError, "k must have q's head dim, 8, got 4"),
    (dict(q=torch.ones(6, 3, 8)), ValueError, "q's heads must be a multiple of k's, got 3 and 2"),
    (dict(q=torch.ones(6, 0, 8)), ValueError, "q's heads must be a multiple of k's, got 0 and 2"),
    (dict(v=torch.ones(6, 2, 257)), ValueError, "v's head dim must be 1 to 256, got 257"),
    (dict(v=torch.ones(6, 2, 0)), ValueError, "v's head dim must be 1 to 256, got 0"),
    (dict(q_offsets=None), TypeError, "q_offsets must be a torch.Tensor, got NoneType"),
    (dict(q_offsets=[0, 2, 6]), TypeError, "q_offsets must be a torch.Tensor, got list"),
    (dict(q_offsets=torch.tensor([0.0, 6.0])), TypeError, "q_offsets must be int32 or int64, got torch.float32"),
    (dict(q_offsets=torch.tensor([0, 2, 6], device="meta")), ValueError, "q_offsets must be on q's device, cpu, or the host, got meta"),
    (dict(q_offsets=torch.tensor([0, 2, 5])), ValueError, "q_offsets must end at the number of rows, 6, got 5"),
    (dict(q_offsets=torch.tensor([0, 4, 2, 6])), ValueError, "q_offsets must not decrease, got 4 then 2 at segment 1"),
    (dict(q_offsets=torch.tensor([1, 6])), ValueError, "q_offsets must start at 0, got 1"),
    (dict(q_offsets="all"), ValueError, 'q_offsets must be a tensor or "shared", got "all"'),
    (dict(q_offsets="shared"), ValueError, 'q_offsets and kv_offsets cannot both be "shared"'),
    (dict(kv_offsets=torch.tensor([0, 6])), ValueError, "must describe the same number of segments, got 2 and 1"),
    (dict(kv_offsets=torch.tensor([0, 3, 7])), ValueError, "kv_offsets must end at the number of rows, 6, got 7"),
    (dict(max_seqlen_q=3), ValueError, "q_offsets has a segment of 4 rows, longer than the stated max_seqlen 3"),
    (dict(max_seqlen_kv=3), ValueError, "kv_offsets has a segment of 4 rows, longer than the stated max_seqlen 3"),
    (dict(max_seqlen_q="4"), TypeError, "max_seqlen must be an int, got str"),
    (dict(scale=torch.tensor(0.5)), TypeError, "scale must be a number, got Tensor"),
    (dict(scale="big"), TypeError, "scale must be a number, got str"),
    (dict(activation="relux"), ValueError, "activation must be one of .*softmax.*, got 'relux'"),
    (dict(implementation="cuda"), ValueError, "implementation must be one of .*, got 'cuda'"),
    (dict(schedule=3), TypeError, "schedule must be a TileSchedule, got int"),
    (dict(schedule=SCHEDULE), ValueError, "schedule was built for 4 heads, q has 2"),
    (dict(schedule=SMALL_TILES), ValueError, r"schedule must have a block_m of \(16, 32, 64, 128\), the kernels' tiles, got 8"),
]


@pytest.mark.parametrize("change, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        F.jagged_attention(**(GOOD | change))


def test_triton_in_float64_is_refused():
    pytest.importorskip("triton")
    with pytest.raises(ValueError, match="q must be float32, float16 or bfloat16 for the triton implementation, got torch.float64"):
        F.jagged_attention(*make_qkv(6, 6, dtype=torch.float64), GOOD["q_offsets"], implementation="triton")
