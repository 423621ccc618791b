"""Launches by `CachedLaunches`: which of them Triton runs, and which share a compiled kernel."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl
from jagged_kernels.common import launch
from jagged_kernels.common.descriptors import head_descriptor as triton_descriptor
from jagged_kernels.common.pipeline import descriptor as gluon_descriptor
from jagged_kernels.common.pipeline import head_descriptor
from jagged_kernels.common.ptxas import safe_ptxas
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction


@triton.jit(do_not_specialize=["length"])
def _kernel(x, size, length, scale, CONSTANT: tl.constexpr, OTHER: tl.constexpr = None):
    pass


def _constant_before_an_argument(x, CONSTANT: tl.constexpr, size):
    pass


@pytest.fixture
def launches(monkeypatch):
    """A list that grows by (launched by "triton" or "cache", compiled kernel, its arguments)."""
    made = []
    driver = SimpleNamespace(
        device=0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_stream=lambda device: 100 + device,
    )

    def run(kernel, *args, grid, warmup, **constants):
        compiled = SimpleNamespace(function="function", packed_metadata="metadata")
        compiled.run = lambda *given: made.append(("cache", compiled, given))
        made.append(("triton", compiled, args))
        return compiled

    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=driver))
    monkeypatch.setattr(launch.ops, "current_device", lambda: driver.device)
    monkeypatch.setattr(JITFunction, "run", run)
    made_by = SimpleNamespace(driver=driver, made=made)
    return made_by


@pytest.fixture
def kernel():
    return safe_ptxas(triton.jit(do_not_specialize=["length"])(_kernel.fn))


X = torch.zeros(64, dtype=torch.bfloat16)


def call(kernel, x=X, size=100, length=7, scale=0.5, constant=3, grid=(4,), **options):
    return kernel[grid](x, size, length, scale, CONSTANT=constant, **options)


def test_a_later_launch_runs_the_kernel_compiled_first(launches, kernel):
    compiled = call(kernel)
    other = torch.ones(16, dtype=torch.bfloat16)
    assert call(kernel, other, 52, 9, 2.0, grid=(5, 6)) is compiled
    (first, _, _), (then, ran, given) = launches.made
    assert (first, then, ran) == ("triton", "cache", compiled)
    assert given[:9] == (5, 6, 1, 100, "function", "metadata", None, None, None)
    assert given[9] is other and given[10:] == (52, 9, 2.0, None, None)


@pytest.mark.parametrize(
    "change",
    [
        dict(x=X[1:]),
        dict(x=X.half()),
        dict(x=X.float()),
        dict(x=None),
        dict(size=1),
        dict(size=16),
        dict(size=2**40),
        dict(size=None),
        dict(size=True),
        dict(size=1.0),
        dict(length=2**40),
        dict(constant=4),
        dict(constant=None),
        dict(OTHER=1),
        dict(num_warps=8),
        dict(num_stages=2),
        dict(maxnreg=128),
    ],
    ids=str,
)
def test_what_a_kernel_is_compiled_for_makes_another_one(launches, kernel, change):
    first, second = call(kernel), call(kernel, **change)
    assert first is not second
    assert call(kernel) is first and call(kernel, **change) is second
    assert [by for by, *_ in launches.made] == ["triton", "triton", "cache", "cache"]


@pytest.mark.parametrize(
    "change",
    [dict(x=X[8:]), dict(size=2), dict(length=1), dict(length=16), dict(scale=1.0)],
    ids=str,
)
def test_other_values_run_the_same_kernel(launches, kernel, change):
    assert call(kernel, **change) is call(kernel)


def test_a_tuple_of_integers_is_described_as_a_whole(launches, kernel):
    """As Triton describes each of them; a struct that holds one is looked into."""
    compiled = call(kernel, size=(64, 1, 5))
    assert call(kernel, size=(32, 1, 9)) is compiled
    others = (64, 2, 5), (8, 1, 5), (64, 1, 16), (64, 1), ((64, 1, 5), X), ()
    kernels = [call(kernel, size=size) for size in others]
    assert len({id(x) for x in (compiled, *kernels)}) == 7
    assert call(kernel, size=((64, 1, 5), X[8:])) is kernels[4]
    assert call(kernel, size=((64, 1, 5), X[1:])) is not kernels[4]


def test_each_device_has_its_own_kernel(launches, kernel):
    first = call(kernel)
    launches.driver.device = 1
    second = call(kernel)
    assert second is not first and call(kernel) is second
    assert launches.made[-1][2][3] == 101  # the stream


def test_settings_of_triton_are_part_of_the_kernel(launches, kernel, monkeypatch):
    first = call(kernel)
    monkeypatch.setattr(knobs.runtime, "debug", True)
    assert call(kernel) is not first
    monkeypatch.undo()


def test_a_setting_for_instrumentation_is_part_of_the_kernel(launches, kernel, monkeypatch):
    first = call(kernel)
    monkeypatch.setattr(knobs.compilation, "instrumentation_mode", "fpsan")
    assert call(kernel) is not first


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_triton_runs_launches_that_a_hook_observes(launches, kernel, hook):
    def observe(metadata):
        pass

    call(kernel)
    getattr(knobs.runtime, hook).add(observe)
    try:
        call(kernel)
    finally:
        getattr(knobs.runtime, hook).remove(observe)
    call(kernel)
    assert [by for by, *_ in launches.made] == ["triton", "triton", "cache"]


def test_triton_runs_launches_of_its_own_kinds(launches, kernel):
    call(kernel)
    kernel.run(X, 100, 7, 0.5, CONSTANT=3, grid=(4,), warmup=True)
    call(kernel, grid=lambda arguments: (4,))
    kernel[(4,)](X, 100, 7, scale=0.5, CONSTANT=3)
    kernel.pre_run_hooks.append(print)
    call(kernel)
    assert [by for by, *_ in launches.made] == ["triton"] * 5


def test_a_compilation_that_a_hook_prevents_is_tried_again(launches, kernel, monkeypatch):
    monkeypatch.setattr(
        JITFunction, "run", lambda *args, **options: launches.made.append("refused")
    )
    assert call(kernel) is call(kernel) is None
    assert launches.made == ["refused", "refused"]


def test_constants_are_the_last_parameters():
    with pytest.raises(
        ValueError,
        match="the constants of _constant_before_an_argument must be its last parameters",
    ):
        safe_ptxas(triton.jit(_constant_before_an_argument))


@pytest.mark.parametrize("make", [triton_descriptor, head_descriptor], ids=["triton", "gluon"])
def test_descriptors_differ_by_their_boxes_alone(launches, kernel, make):
    x = torch.zeros(64, 4, 128, dtype=torch.bfloat16)
    y = torch.zeros(96, 2, 128, dtype=torch.bfloat16)[32:]
    first = call(kernel, make(x, 64))
    assert call(kernel, make(y, 64)) is first
    others = [call(kernel, d) for d in (x, make(x, 32), make(x[..., :64], 64), make(x.half(), 64))]
    assert len({id(compiled) for compiled in (first, *others)}) == 5


@pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="other releases run Triton's own launcher"
)
@pytest.mark.parametrize("described", [True, False])
def test_the_c_launcher_gets_what_tritons_launcher_gives_it(launches, monkeypatch, described):
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    utils = SimpleNamespace(fill_tma_descriptor=lambda *box: box)
    launches.driver.utils = utils
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=launches.driver))
    x, made = torch.zeros(4, 64, 128, dtype=torch.bfloat16), []
    args = (
        (X, head_descriptor(x, 64), None, gluon_descriptor(x, 1, 64, 128), 0.5)
        if described
        else (X, 7, 0.5)
    )
    signature = dict(
        enumerate("tensordesc<bf16[1, 64, 128]>" if hasattr(a, "box") else "i32" for a in args)
    ) | {9: "constexpr"}
    box = dict(swizzle=3, elem_size=2, elem_type=10, block_size=[1, 64, 64], fp4_padded=False)

    def c_launcher(*given):
        made.append(given)

    run = object.__new__(driver.CudaLauncher)
    run.launch = driver.wrap_handle_tensordesc(
        c_launcher, signature, [box] * 2 if described else []
    )
    run.global_scratch_size = run.profile_scratch_size = run.global_scratch_align = (
        run.profile_scratch_align
    ) = 0
    run.launch_cooperative_grid = run.launch_pdl = False
    compiled = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    launch._launcher(compiled, args, (None,))((5, 6, 1), 100, args)
    run(5, 6, 1, 100, "function", "metadata", None, None, None, *args, None)
    ours, theirs = made
    assert len(ours) == len(theirs) and all(a is b or a == b for a, b in zip(ours, theirs))


def test_descriptors_of_triton_and_gluon_differ(launches, kernel):
    x = torch.zeros(4, 64, 128, dtype=torch.bfloat16)
    assert call(kernel, triton_descriptor(x.transpose(0, 1), 64)) is not call(
        kernel, gluon_descriptor(x, 1, 64, 128)
    )
    assert call(kernel, head_descriptor(x.transpose(0, 1), 64)) is call(
        kernel, gluon_descriptor(x, 1, 64, 128)
    )
