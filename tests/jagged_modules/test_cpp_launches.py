"""Exported models for CUDA, without a GPU: what they launch, through a library in place of CUDA's
driver."""

import ctypes
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from jagged_kernels.precompile import traced
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from triton.backends.nvidia import driver

import jagged_modules as jm
from jagged_modules import cpp_library, validation
from jagged_modules import functional as F

from ..compiled import compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
SIZES = {"w": 8, "r": 8, "l": 8, "i": 4, "f": 4}
OFFSETS = torch.tensor([0, 5, 5, 19, 37])
KERNEL = "k.cubin k 96 1000 "


class Library:
    """The operator `launch` on host tensors, with a driver that writes down what it does."""

    def __init__(self, folder: Path):
        self.folder, self.record = folder, folder / "record.txt"
        source = Path(__file__).with_name("recording_driver.cpp")
        self.driver, self.path = folder / "libcuda.so.1", folder / "libjagged_modules.so"
        shared = "g++", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1"
        compiled([*shared, str(source), "-o", str(self.driver)])
        command = [x for x in cpp_library.command(self.path) if not x.endswith("attention.cpp")]
        compiled([*command[:-2], '-DLAUNCHES_ON="CPU"', *command[-2:]])

    def load(self) -> "Library":
        """Into this process."""
        ctypes.CDLL(str(self.driver), mode=ctypes.RTLD_GLOBAL)
        torch.ops.load_library(str(self.path))
        return self

    def recorded(self) -> list[str]:
        """Since the last call."""
        lines = self.record.read_text().splitlines() if self.record.exists() else []
        self.record.unlink(missing_ok=True)
        return lines

    def describe(self, file: str, letters: str) -> None:
        sizes = " ".join(str(SIZES[x.lower()]) for x in letters)
        (self.folder / file).write_text(f"{sizes} 8 8")

    def describe_all(self, program) -> list[str]:
        """The kernels of a program, with their cubins in this folder."""
        described = [x.split() for x in launches_of(program)]
        for file, *_, letters in described:
            self.describe(file, letters)
        return [name for _, name, *_ in described]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    if torch.cuda.is_available():
        pytest.skip("CUDA's own driver is loaded")
    return Library(tmp_path_factory.mktemp("launches")).load()


@pytest.fixture
def library(built, monkeypatch):
    monkeypatch.setenv("DRIVER_RECORD", str(built.record))
    monkeypatch.setenv("JAGGED_CUBINS", str(built.folder))
    built.recorded()
    return built


def launch(letters, written=(), read=(), integers=(), factors=(), grid=(1, 1, 1), kernel=KERNEL):
    written = [torch.empty(4), *written]
    arguments = kernel + "w" + letters, written, list(read), integers, factors, grid
    torch.ops.jagged_kernels.launch(*arguments)
    return written


def attend():
    """With all that has parameters of its own, and lists of tiles."""
    q, kv = torch.randn(37, 4, 24), torch.randn(37, 2, 48)
    k, v = kv.chunk(2, 2)
    bias = jm.RelativeBias(torch.randn(4, 39), torch.randn(4, 6), torch.arange(37))
    mask = jm.AttentionMask(causal=True, num_targets=torch.tensor([1, 0, 3, 2]))
    return F.jagged_attention(q, k, v, OFFSETS, mask=mask, bias=bias, implementation="triton")


def compress():
    index = jm.CandidateIndex.from_offsets(OFFSETS)
    weights = torch.randn(4, 9), torch.randn(4, 10)
    rows = torch.randn(4, 9, 8), torch.randn(37, 10, 8)
    return F.linear_compress(weights, rows, index, implementation="triton")


def blocks():
    q, k, v = torch.randn(3, 37, 2, 16)
    return F.block_diagonal_attention(q, k, v, OFFSETS, block_size=16, implementation="triton")


def by_triton(library, variant, args, grid, file):
    """Launches what was compiled as Triton does."""
    compiled, kernel, stand_in = variant.compile(), variant.source.fn, ctypes.CDLL(library.driver)
    run = driver.CudaLauncher(compiled.src, compiled.metadata)
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    stand_in.cuModuleLoadData(ctypes.byref(module), (library.folder / file).read_bytes())
    name, metadata = compiled.metadata.name.encode(), compiled.metadata
    stand_in.cuModuleGetFunction(ctypes.byref(function), module, name)
    packed = metadata.num_warps, metadata.num_ctas, metadata.shared
    constants = (None,) * (len(kernel.params) - len(args))
    grid = (*grid, 1, 1)[:3]
    run(*grid, 0, function.value, packed, None, None, None, *args, *constants)


@pytest.mark.parametrize("call", [attend, compress, blocks])
def test_parameters_are_those_of_tritons_launcher(library, monkeypatch, call):
    """Byte by byte, with tensors instead of a trace's."""
    monkeypatch.setattr(driver, "library_dirs", lambda: [str(library.folder)])
    launched, described, operator = traced._Trace.launch, [], traced._operator()

    def with_a_known_cubin(description, *args):
        file, *_, letters = description.split()
        library.describe(file, letters)
        described.append(file)
        operator(description, *args)

    def twice(trace, kernel, args, grid, options):
        launched(trace, kernel, args, grid, options)
        ours = [x for x in library.recorded() if "attribute" not in x]
        variant = trace.variants.of(kernel, args, options)
        with torch._C.DisableTorchFunction():  # a trace counts addresses from 0
            by_triton(library, variant, args, grid, described[-1])
        assert ours == library.recorded()

    monkeypatch.setattr(validation, "_triton_interprets", lambda: True)  # takes host tensors
    monkeypatch.setattr(traced, "_operator", lambda: with_a_known_cubin)
    monkeypatch.setattr(traced._Trace, "launch", twice)
    with traced.traced_launches(library.folder, (9, 0)):
        call()
    assert described


def launches_of(program):
    """What a program launches."""
    nodes = program.graph.nodes
    return [x.args[0] for x in nodes if x.target is torch.ops.jagged_kernels.launch.default]


class Attend(torch.nn.Module):
    """Of queries in two groups to keys."""

    def forward(self, q, kv, q_offsets, kv_offsets):
        k, v = kv.chunk(2, 2)
        return F.jagged_attention(q, k, v, q_offsets, kv_offsets, implementation="triton")


def inputs_of_attend(*lengths):
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rows = int(offsets[-1])
    q, kv = torch.randn(2 * rows, 2, 22), torch.randn(rows, 2, 44)
    return q, kv, torch.cat([offsets, rows + offsets[1:]]), offsets


@pytest.fixture
def exported(library, tmp_path, monkeypatch):
    """`Attend`. Values of 22 columns of 44 do not begin at a multiple of 16 bytes."""
    monkeypatch.setenv("JAGGED_CUBINS", str(tmp_path))
    queries, rows, users = (torch.export.Dim(x) for x in ("queries", "rows", "users"))
    shapes = {0: queries}, {0: rows}, {0: 2 * users + 1}, {0: users + 1}
    programs = [
        cpp_library.export_for_cuda(
            Attend(), inputs_of_attend(*example), tmp_path, (9, 0), dynamic_shapes=shapes
        )
        for example in [(3, 0, 5), (64,) * 16]
    ]
    launched = [launches_of(x) for x in programs]
    assert launched[0] == launched[1] and len(launched[0]) == 3
    for description in launched[0]:
        file, *_, letters = description.split()
        library.describe(tmp_path / file, letters)
    return programs[0]


def check_launches_of_attend(call, library):
    """The tensors and sizes of each call, none of the example's."""
    for lengths in [(20, 7), (1,), (0, 0, 64), (300,) * 9]:
        q, kv, q_offsets, kv_offsets = inputs_of_attend(*lengths)
        out, segments = call(q, kv, q_offsets, kv_offsets), 2 * len(lengths)
        assert out.shape == q.shape
        listed, attended, tails = [x.split() for x in library.recorded() if "attribute" not in x]
        pointers = [x.data_ptr() for x in (q, kv, kv[..., 22:], out)]
        assert [number(x) for x in listed[8:10]] == [q_offsets.data_ptr(), kv_offsets.data_ptr()]
        assert [number(attended[i]) for i in (8, 9, 10, 11)] == pointers
        assert [number(tails[i]) for i in (8, 10, 13)] == [out.data_ptr(), segments, len(q)]
        tiles = 2 * (-(-len(q) // 64) + segments)
        assert attended[1] == str(min(tiles, 4))  # multiprocessors that host tensors stand for
    assert call(*inputs_of_attend(0, 0)).shape == (0, 2, 22)
    assert len(library.recorded()) == 2  # there are no rows to fill


def test_an_exported_model_launches_for_all_sizes(exported, library):
    check_launches_of_attend(exported.module(), library)


def test_a_number_of_query_groups_is_the_examples(tmp_path):
    """A kernel's constant: a condition of the exported program, unlike what is chosen by sizes."""
    queries, rows, users, entries = map(torch.export.Dim, ("queries", "rows", "users", "entries"))
    shapes = {0: queries}, {0: rows}, {0: entries}, {0: users + 1}
    q, kv, q_offsets, kv_offsets = inputs_of_attend(3, 0, 5)
    with pytest.raises(Exception, match=r"(Guard failed|violated).*\n?.*q_offsets"):
        program = cpp_library.export_for_cuda(
            Attend(), (q, kv, q_offsets, kv_offsets), tmp_path, (9, 0), dynamic_shapes=shapes
        )
        program.module()(q, kv, torch.cat([q_offsets, kv_offsets[1:] + len(q)]), kv_offsets)


@pytest.mark.slow
def test_a_package_launches_for_all_sizes(exported, library, tmp_path):
    """Without copies of what kernels write."""
    path = torch._inductor.aoti_compile_and_package(exported, package_path=f"{tmp_path}/attend.pt2")
    check_launches_of_attend(torch._inductor.aoti_load_package(path), library)


class Layer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, values, offsets, targets, counts):
        history, index = jm.Jagged(values, offsets), jm.CandidateIndex.from_offsets(counts)
        if isinstance(self.layer, jm.JaggedTargetAttention):
            return self.layer(targets.unsqueeze(1), history, index)
        return self.layer(history).values


def on_cuda(x, fake):
    with fake:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cuda")
        return torch.nn.Parameter(made) if isinstance(x, torch.nn.Parameter) else made


LAYERS = {
    "target": lambda: jm.JaggedTargetAttention(64, 2),
    "gdpa": lambda: jm.JaggedGDPA(64, 2),
    "encoder": lambda: jm.JaggedEncoderLayer(64, 2, 64),
    "hstu": lambda: jm.HSTUStack(64, 2, 2, jm.HSTUConfig(scaling_seqlen=9, relative_position=90)),
    "block": lambda: jm.BlockDiagonalSelfAttention(64, 2, max_seqlen=900, rotary="qkv"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_on_cuda_is_torchs_operators_and_launches(name, dtype, tmp_path, monkeypatch):
    """For any sizes; on compute capability 9.0 too without descriptors."""
    compiled = []
    monkeypatch.setattr(
        traced._Trace, "_described", lambda trace, x: compiled.append(x) or x.kernel
    )
    model, fake = Layer(LAYERS[name]()).eval().to(dtype), FakeTensorMode(shape_env=ShapeEnv())
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            tensors.update({key: on_cuda(x, fake) for key, x in tensors.items() if x is not None})
    rows, offsets = torch.empty(70, 64, dtype=dtype), torch.empty(5, dtype=torch.int64)
    inputs = [on_cuda(x, fake) for x in (rows, offsets, rows[:20], offsets)]
    events, users, count = (torch.export.Dim(x) for x in ("events", "users", "count"))
    shapes = {0: events}, {0: users + 1}, {0: count}, {0: users + 1}
    with torch.fx.experimental._config.patch(backed_size_oblivious=True):  # a single row is a size
        program = cpp_library.export_for_cuda(
            model, tuple(inputs), tmp_path, (9, 0), dynamic_shapes=shapes
        )
    ours = [x for x in program.graph.nodes if "jagged" in str(x.target)]
    assert {str(x.target) for x in ours} == {"jagged_kernels.launch.default"}
    assert all(all(x.args[:4]) for x in ours)  # packages pass None for an empty list
    assert len(ours) == len(compiled) and any("fwd" in x.kernel for x in compiled)
    assert all(x.target.arch == 90 for x in compiled)
    written = {str(x.target).split(".")[1] for node in ours for x in node.args[1]}
    assert written <= {"new_empty", "new_zeros", "empty_like"}
    sizes = program.range_constraints.values()
    assert len(sizes) >= 3 and all(x.lower <= 2 and x.upper > 2**31 for x in sizes)


def number(digits):
    return int.from_bytes(bytes.fromhex(digits), "little")


def test_values_are_passed_in_their_types(library):
    library.describe("k.cubin", "wRrilff")
    x, y = torch.empty(8), torch.empty(8)[1:]
    grid, integers, factors = (2, 3, 4), [-(2**31), 2**40], [0.1, -2.0]
    (w,) = launch("Rrilff", read=[x, y], integers=integers, factors=factors, grid=grid)
    (line,) = library.recorded()
    floats = torch.tensor(factors).view(torch.int32).tolist()
    expected = [w.data_ptr(), x.data_ptr(), y.data_ptr(), 2**31, 2**40, *floats]
    name, *numbers = line.split()[:8]
    assert [name, *map(int, numbers)] == ["k", 2, 3, 4, 96, 1, 1, 1000]
    assert [number(x) for x in line.split()[8:-2]] == [x % 2**32 if x < 0 else x for x in expected]
    assert [number(x) for x in line.split()[-2:]] == [0, 0]


def test_an_empty_grid_launches_nothing(library):
    library.describe("k.cubin", "w")
    launch("", grid=(3, 0, 1))
    assert library.recorded() == []


def test_much_shared_memory_is_asked_for_once(library):
    library.describe("much.cubin", "w")
    for _ in range(2):
        launch("", kernel="much.cubin k 32 49153 ")
    asked, *launches = library.recorded()
    assert asked == "k attribute 8 = 49153" and len(launches) == 2


def test_errors(library, monkeypatch, tmp_path):
    library.describe("k.cubin", "wRi")
    with pytest.raises(RuntimeError, match=r"k needs tensors that begin at a multiple of 16 bytes"):
        launch("R", read=[torch.empty(8)[1:]])
    with pytest.raises(RuntimeError, match="no description of a kernel: k.cubin k 32"):
        launch("", kernel="k.cubin k 32 ")
    with pytest.raises(RuntimeError, match="k takes integers of 32 bits, got 2147483648"):
        launch("i", integers=[2**31])
    (library.folder / "other.cubin").write_text("of another GPU")
    with pytest.raises(RuntimeError, match=r"other\.cubin: no kernel image is available"):
        launch("", kernel="other.cubin k 32 0 ")
    monkeypatch.setenv("JAGGED_CUBINS", str(tmp_path))
    with pytest.raises(RuntimeError, match=rf"folder of none\.cubin, got {tmp_path}"):
        launch("", kernel="none.cubin k 32 0 ")
    monkeypatch.delenv("JAGGED_CUBINS")
    with pytest.raises(RuntimeError, match=r"folder of none\.cubin, is not set"):
        launch("", kernel="none.cubin k 32 0 ")
    assert library.recorded() == []
