"""The linear compression kernels in Triton's interpreter (fp32 and fp16; its bf16 arithmetic is
wrong)."""

import pytest
import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules import functional as F

DTYPES = [torch.float32, torch.float16]


@slow_after(1, "dtype", DTYPES, ids=str)
@pytest.mark.parametrize("grouped", [False, True], ids=["map", "grouped"])
@pytest.mark.parametrize(
    "batches, depths",
    [([5], [33]), ([3, 7], [40, 9]), ([2, 3, 5], [4, 33, 17]), ([1, 1], [1, 70])],
    ids=str,
)
def test_forward_and_gradients(check_linear_compress, batches, depths, grouped, dtype):
    check_linear_compress(batches, depths, 70, 40, dtype, "cpu", grouped)


@pytest.mark.parametrize("num_compressed, width", [(200, 300), (1, 1)], ids=str)
def test_several_shared_levels_of_many_tiles(check_linear_compress, num_compressed, width):
    """The last tile of a matrix is shorter, and levels have rows without candidates."""
    batches, depths = [1, 5, 2, 4, 6], [3, 40, 1, 17, 9]
    check_linear_compress(batches, depths, num_compressed, width, torch.float16, "cpu")


@pytest.mark.parametrize("batches", [[3, 3, 3], [1, 1, 60]], ids=["1:1", "60:1"])
def test_ratios_of_three_levels(check_linear_compress, batches):
    check_linear_compress(batches, [3, 5, 4], 2, 4, torch.float32, "cpu", grouped=True)


@pytest.mark.parametrize(
    "batches, depths", [([2, 3, 0], [3, 4, 5]), ([2, 3, 4], [0, 4, 0])], ids=str
)
def test_nothing_to_multiply_in_three_levels(check_linear_compress, batches, depths):
    check_linear_compress(batches, depths, 5, 8, torch.float32, "cpu")


def test_a_coarser_levels_nan_reaches_its_own_candidates_alone(compress_inputs):
    weights, embeddings, _ = compress_inputs([2, 3, 6], [8, 9, 7], 5, 8, torch.float32, "cpu")
    user_of, vendor_of = torch.tensor([0, 1, 1])[[0, 0, 1, 1, 2, 2]], torch.arange(6) // 2
    embeddings[0][0], embeddings[1][2] = float("nan"), float("inf")
    out = F.linear_compress(weights, embeddings, [user_of, vendor_of], implementation="triton")
    assert out[2:4].isfinite().all()
    assert out[:2].isnan().all() and not out[4:].isfinite().any()


@pytest.mark.parametrize(
    "num_compressed, width", [(1, 1), (64, 16), (130, 37), (200, 256), (5, 260)], ids=str
)
def test_sizes(check_linear_compress, num_compressed, width):
    check_linear_compress([2, 3], [8, 70], num_compressed, width, torch.float16, "cpu")


@pytest.mark.parametrize("num_compressed, width", [(4, 8), (1, 1)], ids=str)
def test_gradient_of_one_candidate_with_any_stride(check_linear_compress, num_compressed, width):
    """A dimension of size 1 may have any stride in a contiguous tensor. Those of a sum and of a
    concatenation have unusual ones."""

    def grad(out):
        wide = torch.randn(1, num_compressed + 6, width)
        return wide[:, :num_compressed] if width > 1 else out.new_ones(()).expand_as(out)

    check_linear_compress([3, 1], [3, 5], num_compressed, width, torch.float32, "cpu", grad=grad)


@pytest.mark.parametrize(
    "batches, depths",
    [([0, 0], [3, 4]), ([2, 0], [3, 4]), ([3, 2], [0, 4]), ([3, 2], [4, 0])],
    ids=str,
)
def test_nothing_to_multiply(check_linear_compress, batches, depths):
    check_linear_compress(batches, depths, 5, 8, torch.float32, "cpu")


@pytest.mark.parametrize("rows", [5, 64, 150])
def test_gemm_of_a_shared_level(rows):
    """The kernel computes a shared level with many rows in fp32, and adds nothing."""
    from jagged_kernels.common.configs import GemmConfig
    from jagged_kernels.linear_compress.op import _gemm

    weight, embedding = torch.randn(rows, 33).half(), torch.randn(7, 33, 40).half()
    config = GemmConfig(block_m=128, block_n=64, block_k=32, num_warps=4, num_stages=3)
    out = _gemm(weight, embedding, (), (), torch.float32, config)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, weight.float() @ embedding.float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("fixed", [False, True], ids=["default", "batch-invariant"])
def test_sums_are_not_rounded_before_the_last_one(fixed):
    """2049, which fp16 has not, and -2048 are results of a shared level and of a candidate, then
    two parts of a weight's gradient."""
    half = dict(dtype=torch.float16)
    weights = (
        torch.tensor([[2048.0, 1.0]] * 5, **half),
        torch.full((5, 3), -2048.0, **half).requires_grad_(),
    )
    candidates = torch.zeros(16, 3, 32, **half)
    candidates[:, 0] = 1
    with jm.batch_invariant(fixed):
        out = F.linear_compress(
            weights,
            (torch.ones(2, 2, 32, **half), candidates),
            torch.arange(16) % 2,
            implementation="triton",
        )
    assert (out == 1).all()
    grad = torch.zeros_like(out)
    grad[0], grad[0, :, 0], grad[-1] = 64, 65, -64
    (gradient,) = torch.autograd.grad(out, weights[1], grad)
    assert (gradient[:, 0] == 1).all()


@pytest.mark.parametrize("groups", [2, 600])
def test_sums_of_few_and_of_many_groups(groups):
    """Few groups use small blocks."""
    from jagged_kernels.linear_compress.op import _group, _sum_groups

    x, index = torch.randn(50, 7, 40), torch.randint(0, groups, (50,))
    expected = torch.zeros(groups, 7, 40).index_add(0, index, x)
    other = torch.randint(0, 3, (50,))
    of_other = torch.zeros(3, 7, 40).index_add(0, other, x)
    sums = _sum_groups(x, [_group(index, groups), _group(other, 3)])
    torch.testing.assert_close(sums, [expected, of_other])
    torch.testing.assert_close(_sum_groups(x, [_group(index, groups)]), [expected])


def test_only_the_gradients_asked_for(compress_inputs):
    weights, embeddings, indices = compress_inputs([2, 3], [8, 9], 5, 8, torch.float32, "cpu")
    expected = torch.autograd.grad(
        F.linear_compress(weights, [x.requires_grad_() for x in embeddings], indices).sum(),
        embeddings,
    )
    for chosen in range(2):
        inputs = [x.detach().requires_grad_(level == chosen) for level, x in enumerate(embeddings)]
        F.linear_compress(weights, inputs, indices, implementation="triton").sum().backward()
        assert inputs[1 - chosen].grad is None
        torch.testing.assert_close(inputs[chosen].grad, expected[chosen])


def test_no_second_derivative(compress_inputs):
    weights, embeddings, indices = compress_inputs([2, 3], [8, 9], 5, 8, torch.float32, "cpu")
    weight = weights[0].requires_grad_()
    (gradient,) = torch.autograd.grad(
        F.linear_compress(weights, embeddings, indices, implementation="triton").sum(),
        weight,
        create_graph=True,
    )
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        gradient.sum().backward()


def test_fp64_is_refused(compress_inputs):
    inputs = compress_inputs([2, 3], [8, 9], 5, 8, torch.float64, "cpu")
    with pytest.raises(
        ValueError,
        match=r"weights\[0\] must be float32, .* with implementation='triton', got torch.float64",
    ):
        F.linear_compress(*inputs, implementation="triton")


def test_hopper_is_refused_where_its_kernel_does_not_run(compress_inputs):
    inputs = compress_inputs([2, 3], [8, 9], 5, 8, torch.float16, "cpu")
    with pytest.raises(
        ValueError, match="'hopper' takes .* capability 9.0.* got torch.float16 on cpu"
    ):
        F.linear_compress(*inputs, implementation="hopper")


class Compress(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(5, k) for k in (9, 12))

    def forward(self, users, candidates, candidate_to_user):
        return F.linear_compress(
            list(self.weights), [users, candidates], [candidate_to_user], implementation="triton"
        )


def batches():
    for num_users, num_candidates in ((3, 7), (2, 2), (5, 4)):
        yield (
            torch.randn(num_users, 9, 8),
            torch.randn(num_candidates, 12, 8),
            torch.randint(0, num_users, (num_candidates,)),
        )


def test_compiled_without_recompiling_per_batch():
    model = Compress()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, batch in enumerate(batches()):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*batch)
        assert torch.equal(out, model(*batch))
        gradients = [
            torch.autograd.grad(x.square().sum(), list(model.parameters()))
            for x in (out, model(*batch))
        ]
        assert all(torch.equal(a, b) for a, b in zip(*gradients))


def test_exported_with_users_and_candidates_dynamic():
    model, (example, *others) = Compress(), batches()
    users, candidates = (torch.export.Dim(name, min=2) for name in ("users", "candidates"))
    exported = torch.export.export(
        model, example, dynamic_shapes=({0: users}, {0: candidates}, {0: candidates})
    ).module()
    for batch in others:
        assert torch.equal(exported(*batch), model(*batch))


@pytest.mark.parametrize("cast", ["weights", "embeddings", "both"])
def test_autocast_is_part_of_the_node(check_compress_in_autocast, cast):
    check_compress_in_autocast(cast, torch.float16, "cpu")


def test_a_second_derivative_of_what_autocast_casts_raises():
    weight, embedding = torch.randn(5, 8, requires_grad=True), torch.randn(3, 8, 16)
    with torch.autocast("cpu", torch.float16):
        out = F.linear_compress(weight, embedding, implementation="triton")
    (dweight,) = torch.autograd.grad(out.float().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="not differentiable twice"):
        dweight.sum().backward()
