"""Layers in torch.compile, torch.export, AOTInductor, torch.fx and CUDA graphs."""

import functools
import inspect
import io

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import jagged_modules as jm

from ..marks import SLOW, slow_after
from .cases import CASES, SIZES, Compressed, make, training_step
from .table import feature

OFFSETS_OF = {"offsets": "values"}  # of the models' arguments


def compiled(model, **options):
    """The model compiled as one graph, and the counter of compilations."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter, **options), counter


def assert_same_steps(graph, model, case, sizes=SIZES):
    for size in sizes:
        inputs = case.model.inputs(*size)
        torch.testing.assert_close(training_step(graph, inputs), training_step(model, inputs))


@feature("torch.compile, dynamic", fast=6)
def test_dynamic_compilation(case):
    model = make(case)
    graph, counter = compiled(model, dynamic=True)
    assert_same_steps(graph, model, case, SIZES[:1])
    # 2 if torch first takes Python floats, such as dropout's probability, as inputs
    first = counter.frame_count
    assert_same_steps(graph, model, case, SIZES[1:])
    assert counter.frame_count == first


@feature("torch.compile, static", fast=1)
def test_static_compilation(case):
    model = make(case)
    graph, _ = compiled(model, dynamic=False)
    assert_same_steps(graph, model, case, SIZES[:2])


@SLOW
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_inductor_with_int32_offsets(case):
    """The other tests compile by aot_eager, without Inductor's passes."""
    model = make(case)
    torch._dynamo.reset()
    graph = torch.compile(model, fullgraph=True, dynamic=True)
    for size in SIZES[:2]:
        inputs = [x if x.is_floating_point() else x.int() for x in case.model.inputs(*size)]
        results = training_step(graph, inputs), training_step(model, inputs)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@feature("torch.compile, reduce-overhead")
def test_compiled_to_cuda_graphs(case):
    model = make(case).cuda()
    torch._dynamo.reset()
    counters.clear()
    graph = torch.compile(model, fullgraph=True, dynamic=False, mode="reduce-overhead")
    for _ in range(4):  # warm-up, capture, replays
        inputs = [x.cuda() for x in case.model.inputs(*SIZES[0])]
        torch.compiler.cudagraph_mark_step_begin()
        torch.testing.assert_close(
            training_step(graph, inputs), training_step(model, inputs), rtol=1e-4, atol=1e-5
        )
    assert not counters["inductor"]["cudagraph_skips"]


def dynamic_shapes(model) -> dict:
    names = inspect.signature(model.forward).parameters
    return {name: {0: torch.export.Dim.DYNAMIC} for name in names}


def exported(model, case) -> torch.export.ExportedProgram:
    shapes = dynamic_shapes(model)
    return torch.export.export(model, case.model.inputs(*SIZES[0]), dynamic_shapes=shapes)


@torch.no_grad()
def assert_same_results(graph, model, case):
    for size in [*SIZES, (2, 3, 40)]:
        inputs = case.model.inputs(*size)
        torch.testing.assert_close(graph(*inputs), model(*inputs))


@feature("torch.export", fast=6)
def test_export(case):
    model, file = make(case), io.BytesIO()
    torch.export.save(exported(model, case), file)
    file.seek(0)
    assert_same_results(torch.export.load(file).module(), model, case)


@slow_after(3, "case", list(CASES.values()), ids=lambda case: case.name)
def test_draft_export(case):
    """At the sizes of the example: torch takes that of offsets for constant, at a view of the last
    one, and says so in its report."""
    model, inputs = make(case), case.model.inputs(*SIZES[0])
    program = torch.export.draft_export(model, inputs, dynamic_shapes=dynamic_shapes(model))
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))


class Together(torch.nn.Module):
    """The models of all cases in one."""

    def __init__(self):
        super().__init__()
        self.models = torch.nn.ModuleDict({name: make(case) for name, case in CASES.items()})

    def forward(self, inputs):
        return {name: model(*inputs[name]) for name, model in self.models.items()}


@pytest.fixture(scope="module")
def packaged(tmp_path_factory):
    """Inputs of one case → its model's result from a package that has the models of all: a package
    takes a compiler of C++ seconds, most of them for torch's headers."""
    inputs = {name: case.model.inputs(*SIZES[0]) for name, case in CASES.items()}
    shapes = {name: tuple({0: torch.export.Dim.DYNAMIC} for _ in x) for name, x in inputs.items()}
    program = torch.export.export(Together(), (inputs,), dynamic_shapes={"inputs": shapes})
    path = str(tmp_path_factory.mktemp("package") / "models.pt2")
    package = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=path)
    )
    return lambda case, *own: package(inputs | {case.name: own})[case.name]


@feature("AOTInductor", fast=0)
def test_aot_inductor(case, packaged):
    assert_same_results(functools.partial(packaged, case), make(case), case)


@feature("torch.fx")
def test_symbolic_trace(case):
    model = make(case)
    traced = torch.fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.op == "call_module"] == ["layer"]
    assert_same_steps(traced, model, case)


@pytest.mark.gpu
@feature("CUDA graphs")
def test_cuda_graphs(case):
    model, (inputs, other) = (
        make(case).cuda(),
        ([x.cuda() for x in case.model.inputs(*SIZES[0])] for _ in range(2)),
    )
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):  # kernels are compiled, and allocations made, before the capture
            training_step(model, inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = training_step(model, inputs)
    for x, y in zip(inputs, other):
        x.copy_(y)
    graph.replay()
    torch.testing.assert_close(results, training_step(model, other))


@pytest.mark.gpu
@feature("jm.graphed")
def test_graphed(case):
    model = make(case).cuda()
    graph = jm.graphed(model, offsets=None if case.model is Compressed else OFFSETS_OF)
    for users, rows, candidates in (*SIZES, (5, 44, 12), *SIZES):
        inputs = [x.cuda() for x in case.model.inputs(users, rows, candidates)]
        if case.name == "JaggedDINAttention-mask":  # a map is padded with candidates of user 0
            inputs[-1] = jm.CandidateIndex.from_map(inputs[-1], users)
        torch.testing.assert_close(
            training_step(graph, inputs), training_step(model, inputs), rtol=1e-4, atol=1e-5
        )
