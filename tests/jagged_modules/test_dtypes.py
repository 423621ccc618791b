"""Every function with every dtype of torch, on every device: a right result where the table lists
the dtype, else a ValueError."""

import re

import pytest
import torch
from torch._subclasses import FakeTensor, FakeTensorMode

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.dtypes import DTYPES, EVERYWHERE, WrongDtype, dtype_table, dtypes_of

from ..compatibility.cases import CASES, SIZES, make

ALL_DTYPES = sorted({x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=str)
# made on the CPU alone
QUANTIZED = [dtype for dtype in ALL_DTYPES if str(dtype).startswith(("torch.qint", "torch.quint"))]
OFFSETS = torch.tensor([0, 2, 5])
DEVICES = ["cpu", "meta", pytest.param("cuda", marks=pytest.mark.gpu)]


class Inputs:
    """Small numbers that every dtype represents exactly, multiples of `unit`; offsets and indices
    on the device."""

    def __init__(self, dtype: torch.dtype, device: str, unit: float) -> None:
        self.dtype, self.device, self.unit = dtype, device, unit
        self.offsets = OFFSETS.to(device)
        self.plan = F.ScorePlan.from_offsets(OFFSETS).to(device)
        self.candidates = jm.CandidateIndex.from_counts(torch.tensor([1, 2])).to(device)

    def __call__(self, *shape: int) -> torch.Tensor:
        numbers = (torch.arange(torch.Size(shape).numel()).view(shape) * 7 % 5) * self.unit
        try:
            return numbers.to(self.device, self.dtype)
        # no conversion to this dtype: no function takes it, whatever the values
        except (RuntimeError, NotImplementedError):
            return self._uninitialized(shape)

    def _uninitialized(self, shape: tuple[int, ...]) -> torch.Tensor:
        if self.dtype in QUANTIZED:
            return torch._empty_affine_quantized(
                shape, scale=1.0, zero_point=0, dtype=self.dtype, device=self.device
            )
        return torch.empty(shape, dtype=self.dtype, device=self.device)


CALLS = {
    "jagged_attention": lambda x, **kw: F.jagged_attention(
        x(5, 2, 8), x(5, 2, 8), x(5, 2, 8), x.offsets, **kw
    ),
    "target_attention": lambda x, **kw: F.target_attention(
        x(3, 2, 2, 8), x(5, 2, 8), x(5, 2, 8), x.candidates, x.offsets, **kw
    ),
    "self_target_attention": lambda x, **kw: F.self_target_attention(
        x(5, 2, 8), x(5, 2, 8), x(5, 2, 8), x(5, 2, 8), x.offsets, x.offsets, **kw
    )[1],
    "block_diagonal_attention": lambda x, **kw: F.block_diagonal_attention(
        x(5, 2, 8), x(5, 2, 8), x(5, 2, 8), x.offsets, **kw
    ),
    "block_diagonal_attention_packed": lambda x, **kw: F.block_diagonal_attention_packed(
        x(5, 3, 2, 8), x.offsets, **kw
    ),
    "din_attention": lambda x, **kw: F.din_attention(
        x(3, 4),
        x(5, 4),
        x(5, 4),
        x.candidates,
        x.offsets,
        [x(3, 16), x(1, 3)],
        [x(3), x(1)],
        activation="relu",
        **kw,
    ),  # fmt: skip
    "linear_compress": lambda x, **kw: F.linear_compress(x(3, 4), x(5, 4, 8), **kw),
    "jagged_dense_bmm": lambda x, **kw: F.jagged_dense_bmm(x(5, 4), x(2, 4, 3), x.offsets, **kw),
    "jagged_jagged_bmm": lambda x, **kw: F.jagged_jagged_bmm(x(5, 4), x(5, 3), x.offsets, **kw),
    "jagged_sum": lambda x, **kw: F.jagged_sum(x(5, 4), x.offsets, **kw),
    "jagged_mean": lambda x, **kw: F.jagged_mean(x(5, 4), x.offsets, **kw),
    "jagged_softmax": lambda x, **kw: F.jagged_softmax(x(5, 4), x.offsets, **kw),
    "jagged_jagged_bmm_jagged_out": lambda x, **kw: F.jagged_jagged_bmm_jagged_out(
        x(5, 4), x(5, 4), x.plan, **kw
    ),
    "array_jagged_bmm_jagged_out": lambda x, **kw: F.array_jagged_bmm_jagged_out(
        x(13), x(5, 4), x.plan, **kw
    ),
    "jagged2_softmax": lambda x, **kw: F.jagged2_softmax(x(13), x.plan, **kw),
    "jagged_linear (weight per segment)": lambda x, **kw: F.jagged_linear(
        x(5, 4), x(2, 4, 3), x(2, 3), x.offsets, "silu", **kw
    ),
    "jagged_linear (one weight)": lambda x: F.jagged_linear(x(5, 4), x(3, 4), x(3), None, "silu"),
    "jagged_layer_norm": lambda x: F.jagged_layer_norm(x(5, 4), x(4), x(4)),
    "jagged_dense_add": lambda x: F.jagged_dense_add(x(5, 4), x(2, 3, 4), x.offsets),
    "jagged_dense_mul": lambda x: F.jagged_dense_mul(x(5, 4), x(2, 3, 4), x.offsets),
    "apply_rotary": lambda x: F.apply_rotary(x(5, 2, 8), x(5, 4), x(5, 4)),
    "jagged_concat": lambda x: F.jagged_concat(
        [x(5, 4), x(3, 4)], [x.offsets, torch.tensor([0, 3, 3]).to(x.device)]
    )[0],
    "jagged_split": lambda x: F.jagged_split(x(5, 4), x.offsets, 1)[1][0],
    "jagged_max": lambda x: F.jagged_max(x(5, 4), x.offsets),
    "jagged_first": lambda x: F.jagged_first(x(5, 4), x.offsets)[0],
    "jagged_last": lambda x: F.jagged_last(x(5, 4), x.offsets)[0],
    "jagged_between": lambda x: F.jagged_between(
        x(5, 4), x.offsets, times=torch.arange(5, device=x.device), start=0
    )[0],
    "jagged_select": lambda x: F.jagged_select(x(5, 4), x.offsets, x.offsets[:1], 2)[0],
    "jagged_to_padded": lambda x: F.jagged_to_padded(x(5, 4), x.offsets, 3),
    "padded_to_jagged": lambda x: F.padded_to_jagged(x(2, 3, 4), x.offsets, 5),
}
NO_FLOAT64 = (  # how an error begins that names a layer's argument
    r"(x|history|weights\[0\])('s values)? must be float32, float16 or bfloat16 for .*, got"
    " torch.float64"
)
WITH_KERNELS = [function for function, (plain, kernels) in DTYPES.items() if plain != kernels]


def test_the_table_lists_every_public_function():
    assert set(CALLS) == set(DTYPES)
    assert {function.split(" ")[0] for function in DTYPES} == set(F.__all__) - {"ScorePlan"}


def test_every_function_supports_the_dtypes_of_everywhere():
    assert all(set(EVERYWHERE) <= set(dtypes) for rule in DTYPES.values() for dtypes in rule)


def check(function: str, dtype: torch.dtype, device: str, **options) -> None:
    if dtype in QUANTIZED and device != "cpu":
        return
    inputs = Inputs(dtype, device, unit=0.25 if dtype.is_floating_point else 1)
    if dtype not in dtypes_of(function, torch.device(device), **options):
        with pytest.raises(ValueError, match=f"must be .* for .* on {device}.*, got {dtype}"):
            CALLS[function](inputs, **options)
        return
    out = CALLS[function](inputs, **options)
    exact = CALLS[function](Inputs(torch.float64, "cpu", inputs.unit))
    assert out.dtype == dtype and out.device.type == device and out.shape == exact.shape
    if device != "meta":
        torch.testing.assert_close(out.cpu(), exact.to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("function", CALLS)
def test_a_right_result_or_an_error(function, device):
    for dtype in ALL_DTYPES:
        check(function, dtype, device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("function", WITH_KERNELS)
def test_the_reference(function, device):
    for dtype in ALL_DTYPES:
        check(function, dtype, device, implementation="reference")


@pytest.mark.parametrize("function", CALLS)
def test_tensors_are_dense(function):
    """One tensor at a time is sparse: the first, then the second, and so on."""
    tensors = []
    CALLS[function](_Sparse(tensors, None))
    for sparse in range(len(tensors)):
        with pytest.raises(ValueError, match="must be a dense tensor, got torch.sparse_coo"):
            CALLS[function](_Sparse([], sparse))


class _Sparse(Inputs):
    def __init__(self, tensors: list, sparse: int | None) -> None:
        super().__init__(torch.float32, "cpu", 1)
        self.tensors, self.sparse = tensors, sparse

    def __call__(self, *shape: int) -> torch.Tensor:
        x = super().__call__(*shape)
        self.tensors.append(x)
        return x.to_sparse() if self.sparse == len(self.tensors) - 1 else x


@pytest.mark.parametrize("implementation", ["triton", "hopper"])
@pytest.mark.parametrize("function", WITH_KERNELS)
def test_kernels_take_no_host_tensors(function, implementation):
    """The error names the argument, not an internal function."""
    if (
        implementation == "hopper"
        and function.startswith(("jagged_", "jagged2", "array", "din"))
        and function != "jagged_attention"
    ):
        pytest.skip("has no such implementation")
    with pytest.raises(
        ValueError,
        match=(
            f"^implementation='{implementation}' needs CUDA tensors, got cpu tensors; 'auto' takes"
            " both"
        ),
    ):
        CALLS[function](Inputs(torch.float32, "cpu", 1), implementation=implementation)
    with pytest.raises(ValueError, match="float32, float16 or bfloat16 for .*, got torch.float64"):
        CALLS[function](Inputs(torch.float64, "cpu", 1), implementation=implementation)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_layers_in_float64_on_a_gpu(case):
    """The CPU's results, or an error before any launch."""
    model, inputs = make(case).double(), case.model.inputs(*SIZES[0])
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    expected = model(*inputs)
    try:
        found = model.cuda()(*(x.cuda() for x in inputs))
    except WrongDtype as error:
        assert re.match(NO_FLOAT64, str(error))
    else:
        torch.testing.assert_close(found.cpu(), expected)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_layers_name_their_argument_in_float64(case, monkeypatch):
    """As on a GPU, before the layer computes anything."""
    rule = lambda _, implementation: implementation != "reference"  # noqa: E731
    monkeypatch.setattr("jagged_modules.dtypes.uses_kernels", rule)
    model, inputs = make(case).double(), case.model.inputs(*SIZES[0])
    inputs = [x.double() if x.is_floating_point() else x for x in inputs]
    if case.name == "JaggedMLP":
        assert model(*inputs).dtype == torch.float64
        return
    with pytest.raises(WrongDtype, match=NO_FLOAT64):
        model(*inputs)


def test_a_device_without_a_path():
    x = FakeTensor(FakeTensorMode(), torch.empty(5, 4, device="meta"), torch.device("xpu:0"))
    with pytest.raises(
        ValueError,
        match="x must be on the CPU or a CUDA device, got xpu:0; .*reference.* takes any device",
    ):
        F.jagged_softmax(x, OFFSETS)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64], ids=str)
def test_other_floating_point_arguments(dtype):
    x, table = torch.randn(5, 2, 8), torch.ones(5, 4).to(dtype)
    with pytest.raises(ValueError, match=f"output_scale must be float64, .*, got {dtype}"):
        F.jagged_attention(
            x, x, x, OFFSETS, activation="silu", output_scale=torch.ones(2).to(dtype)
        )
    with pytest.raises(ValueError, match=f"cos must be float64, .*, got {dtype}"):
        jm.Rotary(table, table)


@pytest.mark.parametrize(
    "make",
    [jm.JaggedGDPA, jm.GDPABlock, jm.BlockDiagonalSelfAttention, jm.HSTULayer],
    ids=lambda make: make.__name__,
)
def test_layers_refuse_fp8_under_autocast_too(make):
    layer, x = make(8, 2), torch.randn(5, 8).to(torch.float8_e4m3fn)
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ValueError, match="x's values must have the layer's dtype, .*got .*float8"),
    ):
        layer((x, OFFSETS))


def test_the_documented_table_is_the_rule():
    """One row for each set of dtypes; it stands in the documentation of `functional`."""
    table = dtype_table()
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
    for function, (plain, kernels) in DTYPES.items():
        (row,) = [row for row in rows if f"`{function}`" in row[0]]
        _, first, second = row
        cells = first, first if second == "the same" else second
        for cell, dtypes in zip(cells, (plain, kernels), strict=True):
            assert cell.replace(" or ", ", ").split(", ") == [
                str(dtype).removeprefix("torch.") for dtype in dtypes
            ]
    assert table in F.__doc__


def test_implementations_without_kernels_are_those_of_the_functions():
    from jagged_modules.functional.attention_arguments import ATTENTION_IMPLEMENTATIONS
    from jagged_modules.functional.linear_compress import COMPRESS_IMPLEMENTATIONS

    others = {"auto", "triton", "hopper"}
    assert {*ATTENTION_IMPLEMENTATIONS, *COMPRESS_IMPLEMENTATIONS} == {"reference", *others}
