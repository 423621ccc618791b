"""Fused models exported, compiled and packaged: users, candidates and events are independent
sizes."""

import subprocess
import sys
import textwrap

import pytest
import torch
from marks import SLOW
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import jagged_modules as jm
from jagged_modules.transforms import fuse_broadcasts

WIDTH, HEADS = 16, 2
AUTO = torch.export.Dim.AUTO
# users, candidates, events; the first are those of the export
SIZES = [(3, 20, 7), (5, 4, 9), (2, 300, 2), (1, 1, 1), (8, 2, 30)]
SHAPES = dict(
    history={0: AUTO, 1: AUTO}, padding={0: AUTO, 1: AUTO}, profile={0: AUTO}, item={0: AUTO}
)


class Model(nn.Module):
    """A head over the attention of the item to the history, of which padding is hidden, and a tower
    of the user's profile."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.profile = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
        self.over = nn.Sequential(nn.Linear(3 * WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, history, padding, profile, item):
        interest, _ = self.attention(item[:, None], history, history, key_padding_mask=padding)
        return self.over(torch.cat([interest[:, 0], self.profile(profile), item], -1))


def user_inputs(users, events):
    padding = torch.rand(users, events) < 0.4  # no prefix
    padding[:, -1] = False
    return dict(
        history=torch.randn(users, events, WIDTH),
        padding=padding,
        profile=torch.randn(users, WIDTH),
    )


def inputs(users, candidates, events):
    """Keyword inputs of a fused model, without those of users without candidates at the end."""
    index = torch.randint(users, (candidates,))
    return user_inputs(users, events) | dict(
        item=torch.randn(candidates, WIDTH), candidate_to_user=index
    )


def expected(model, given):
    index = given["candidate_to_user"]
    users = (given[name][index] for name in ("history", "padding", "profile"))
    return model(*users, given["item"])


def fused_on(device="cpu", dtype=torch.float32):
    torch.manual_seed(0)
    model = Model().to(device, dtype).eval()
    example = moved(user_inputs(64, 7) | dict(item=torch.randn(64, WIDTH)), device, dtype)
    fused = fuse_broadcasts(
        model, example, request_only=("history", "padding", "profile"), dynamic_shapes=SHAPES
    )
    assert any(site.decision == "fused" for site in fused.report.sites)
    return model, fused


def moved(given, device, dtype=torch.float32):
    return {
        name: x.to(device, dtype if x.is_floating_point() else None) for name, x in given.items()
    }


def exported(fused, device="cpu"):
    users, candidates, events = (
        torch.export.Dim(name) for name in ("users", "candidates", "events")
    )
    both = {0: users, 1: events}
    shapes = dict(
        history=both,
        padding=both,
        profile={0: users},
        item={0: candidates},
        candidate_to_user={0: candidates},
    )
    with torch.no_grad():
        return torch.export.export(
            fused, (), moved(inputs(*SIZES[0]), device), dynamic_shapes=shapes
        )


@pytest.fixture(scope="module")
def model_and_fused():
    return fused_on()


def assert_same(found, model, sizes=SIZES, device="cpu"):
    """found(**inputs) for all sizes."""
    with torch.no_grad():
        for size in sizes:
            given = moved(inputs(*size), device)
            torch.testing.assert_close(found(**given), expected(model, given), rtol=1e-4, atol=1e-5)


def test_export(model_and_fused, tmp_path):
    model, fused = model_and_fused
    program = exported(fused)
    assert_same(program.module(), model)
    torch.export.save(program, tmp_path / "model.pt2")
    assert_same(torch.export.load(tmp_path / "model.pt2").module(), model)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_compile(model_and_fused, backend):
    """One compilation for all sizes."""
    model, fused = model_and_fused
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(fused, fullgraph=True, dynamic=True, backend=counter)
    assert_same(compiled, model, [(3, 20, 7), (5, 30, 9), (2, 300, 3)])
    assert counter.frame_count == 1


class Compress(nn.Module):
    """A head over a compression of users' and items' features."""

    def __init__(self):
        super().__init__()
        self.weight, self.over = nn.Parameter(torch.randn(5, 18)), nn.Linear(5 * WIDTH, 1)

    def forward(self, user, item):
        return self.over((self.weight @ torch.cat([user, item], 1)).flatten(1))


def test_without_attention_there_are_only_torch_operators():
    """On the CPU. So packages of such models need no Python."""
    example = torch.randn(64, 16, WIDTH), torch.randn(64, 2, WIDTH)
    fused = fuse_broadcasts(Compress().eval(), example, request_only=("user",))
    assert any(
        getattr(node.target, "__name__", "") == "compress_unchecked" for node in fused.graph.nodes
    )
    users, candidates = torch.export.Dim("users"), torch.export.Dim("candidates")
    shapes = dict(user={0: users}, item={0: candidates}, candidate_to_user={0: candidates})
    index = dict(candidate_to_user=torch.arange(20) % 3)
    program = torch.export.export(
        fused, (example[0][:3], example[1][:20]), index, dynamic_shapes=shapes
    )
    called = {node.target for node in program.graph.nodes if node.op == "call_function"}
    assert {x.namespace for x in called if isinstance(x, torch._ops.OpOverload)} == {"aten"}
    assert {x.__module__ for x in called if not isinstance(x, torch._ops.OpOverload)} <= {
        "_operator"
    }


LOAD = """
    import sys
    import torch
    import {operators}

    package = torch._inductor.aoti_load_package(sys.argv[1])
    for given, expected in torch.load(sys.argv[2]):
        with torch.no_grad():
            torch.testing.assert_close(package(**given), expected, rtol=1e-4, atol=1e-5)
    assert not [name for name in sys.modules if name.startswith("jagged_modules.transforms")]
    print("same results")
"""


CONTROL = """
    import sys
    import torch

    device, path = sys.argv[1:]
    x = torch.randn(3, 2, device=device)
    program = torch.export.export(torch.nn.Linear(2, 2, device=device), (x,))
    torch._inductor.aoti_load_package(torch._inductor.aoti_compile_and_package(program, package_path=path))
"""  # noqa: E501


def run_python(code, *args):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, args)],
        capture_output=True,
        text=True,
    )


def check_package(tmp_path, device, operators):
    """A package runs in a process that imports the operators alone, for sizes that the export did
    not see."""
    model, fused = fused_on(device)
    package = torch._inductor.aoti_compile_and_package(
        exported(fused, device), package_path=str(tmp_path / "model.pt2")
    )
    with torch.no_grad():
        cases = [
            (given, expected(model, given))
            for size in SIZES
            for given in [moved(inputs(*size), device)]
        ]
    torch.save(cases, tmp_path / "cases.pt")
    run = run_python(LOAD.format(operators=operators), package, tmp_path / "cases.pt")
    if run.returncode < 0 and run_python(CONTROL, device, tmp_path / "control.pt2").returncode < 0:
        pytest.skip(
            "torch's package of a Linear crashes too: this machine's C++ compiler (CXX) does not"
            " fit its torch"
        )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "same results\n"


@pytest.mark.slow
def test_package_for_the_cpu(tmp_path):
    check_package(tmp_path, "cpu", "jagged_modules.cpu.attention")


@pytest.mark.gpu
def test_package_for_cuda(tmp_path):
    check_package(tmp_path, "cuda", "jagged_kernels.attention.op")


@pytest.mark.gpu
def test_compiled_to_cuda_graphs():
    """Inductor's CUDA graphs, with another map in each call."""
    model, fused = fused_on("cuda")
    torch._dynamo.reset()
    counters.clear()
    graph = torch.compile(fused, fullgraph=True, dynamic=False, mode="reduce-overhead")
    assert_same(graph, model, 4 * [(3, 20, 7)], "cuda")  # warm-up, capture, replays
    assert not counters["inductor"]["cudagraph_skips"]


@pytest.mark.gpu
def test_graphed():
    """CUDA graphs of bucketed capacities, with another map and other sizes in each call."""
    model, fused = fused_on("cuda")
    graphed = jm.graphed(fused, steps_per_octave=1)
    sizes = [
        (users, candidates, 7)
        for users, candidates in ((3, 20), (4, 31), (3, 17), (4, 20), (2, 30), (4, 32))
    ]
    assert_same(graphed, model, sizes, "cuda")
    assert graphed.captures == 1  # capacities of 8 users and 32 candidates
