"""Kernels that were compiled before are found by a process that cannot compile any."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import jagged_modules as jm

pytest.importorskip("triton")

from benchmarks.training_steps import training_steps
from jagged_kernels.common import precompiled
from jagged_kernels.precompile import build
from jagged_kernels.precompile.recorder import recorded_launches
from marks import slow_after
from triton import knobs

from jagged_modules import precompile as program

from .batches import FIRST_BATCHES, LATER_BATCHES

ROOT = Path(__file__).parents[2]
# users, events and candidates of each, for which kernels are chosen that are rare
OTHER_SIZES = [(1, 6000, 1), (5, 2500, 300), (3000, 1, 15), (64, 1900, 35), (100, 1500, 90)]
MODEL = """
import torch
import jagged_modules as jm

def attend(q, offsets):
    return jm.functional.jagged_attention(q, q, q, offsets)

def make():
    q, offsets = torch.empty(300, 2, 64, dtype=torch.bfloat16), torch.tensor([0, 100, 300])
    return {"rows": jm.JaggedMLP([16, 16], "gelu_tanh"), "attention": (attend, (q, offsets))}
"""
FIND = """
import sys
from jagged_kernels.precompile.recorder import recorded_launches
from jagged_modules import precompile
from triton import compiler
from triton.backends.nvidia import driver
from triton.runtime import build

def refuse(*args, **options):
    raise AssertionError("compiles")

compiler.compile = build._build = refuse
with recorded_launches((9, 0)) as launches:
    for entry in precompile.entries_of(sys.argv[1]):
        for call in precompile.calls_of(entry):
            precompile.run(*call)
driver.CudaUtils()
for launch in set(launches):
    kernel = launch.compile()
    assert kernel.asm["cubin"] and driver.CudaLauncher(kernel.src, kernel.metadata).launch
print(*{launch.kernel for launch in launches})
"""


FIRST_CALLS = """
import sys
import jagged_modules
loaded = {name for name in sys.modules if name.startswith("jagged_kernels.")}
assert "jagged_kernels.rows.activation" in loaded
from jagged_kernels.precompile.recorder import recorded_launches
from jagged_modules import precompile
with recorded_launches((9, 0)) as launches:
    for entry in precompile.entries_of(sys.argv[1]):
        for call in precompile.calls_of(entry):
            precompile.run(*call)
later = {name for name in sys.modules if name.startswith("jagged_kernels.")} - loaded
assert launches and all("precompile" in name for name in later), later
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A folder with a model, its kernels in a zip, and a library in place of CUDA's driver."""
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "model.py").write_text(MODEL)
    out = folder / "kernels.zip"
    model = f"{folder / 'model.py'}:make"
    program.main(["--capability", "9.0", "--layers", model, "--out", str(out), "--jobs", "2"])
    with build._triton_builds_into(folder):
        pass
    return folder


@pytest.fixture
def unloaded(monkeypatch):
    """No loaded kernels, before the test and after."""
    monkeypatch.setattr(precompiled, "_folders", {})
    monkeypatch.setattr(precompiled, "_modules", set())
    with knobs.cache.scope():
        yield


def launches_of(layer, capability=(9, 0)):
    with recorded_launches(capability) as launches:
        for arguments in program.inputs_of(layer, 7, 200, 40):
            program.run(layer, arguments)
    return set(launches)


@slow_after(1, "unpacked", [True, False], ids=["folder", "zip"])
def test_a_process_without_a_compiler_finds_all(made, tmp_path, unpacked):
    """Elsewhere than they were written, with no C compiler and no cache that can be written."""
    kernels = tmp_path / "moved.zip"
    shutil.copy(made / "kernels.zip", kernels)
    if unpacked:
        shutil.unpack_archive(kernels, tmp_path / "moved")
        kernels = tmp_path / "moved"
    files = sorted(tmp_path.rglob("*"))
    environment = dict(
        JAGGED_KERNELS=str(kernels),
        LD_LIBRARY_PATH=str(made / "stub"),
        PATH="",
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "kernels"))),
        TRITON_CACHE_DIR="/dev/null/cache",
    )
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", FIND]
    found = subprocess.run(
        [*command, f"{made / 'model.py'}:make"], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert found.returncode == 0
    # Gluon with TMA descriptors, and Triton
    assert {"attention_fwd_hopper_kernel", "activation_bwd_kernel"} <= set(found.stdout.split())
    assert sorted(tmp_path.rglob("*")) == files


def test_the_first_calls_import_nothing(made):
    """The modules of kernels, and of what launches them, are imported with jagged_modules."""
    environment = os.environ | dict(
        JAGGED_KERNELS=str(made / "kernels.zip"),
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, ROOT / "kernels"))),
    )
    command = [sys.executable, "-c", FIRST_CALLS, f"{made / 'model.py'}:make"]
    subprocess.run(command, env=environment, check=True)


def test_names_tell_apart_what_triton_tells_apart():
    """One file name for each of Triton's keys."""
    layers = jm.JaggedTargetAttention(64, 2).bfloat16(), jm.JaggedMLP([16, 16], "relu")
    launches = [x for layer in layers for x in launches_of(layer)]
    launches += launches_of(layers[1], (8, 0))
    ours = [precompiled.entry_name(x.source, x.options) for x in launches]
    options = [sorted(x.options.items()) for x in launches]
    triton = [(x.source.hash(), x.target.arch, str(o)) for x, o in zip(launches, options)]
    assert len(set(ours)) == len(set(triton)) == len(set(zip(ours, triton)))


@pytest.mark.parametrize("part", ["signature", "constants", "attrs", "options"])
def test_a_name_depends_on(part):
    (launch, *_) = launches_of(jm.JaggedMLP([16, 16], "relu"))
    source, options = copy.copy(launch.source), launch.options
    if part == "options":
        options = options | {"num_warps": 2 * options["num_warps"]}
    else:
        changed = dict(getattr(source, part))
        assert changed.popitem()
        setattr(source, part, changed)
    before = precompiled.entry_name(launch.source, launch.options)
    assert precompiled.entry_name(source, options) != before


@pytest.mark.parametrize(
    "name, layer",
    [
        ("JaggedTargetAttention(256, 4)", lambda: jm.JaggedTargetAttention(256, 4)),
        (
            "HSTUStack(128, 2, num_layers=2)",
            lambda: jm.HSTUStack(128, 2, 2, jm.HSTUConfig(scaling_seqlen=512)),
        ),
    ],
    ids=["target attention", "HSTU"],
)
def test_the_batches_reach_each_choice_of_kernels(name, layer):
    """Training steps with batches of other sizes launch no other kernels."""

    def names(launches):
        return {(x.kernel, precompiled.entry_name(x.source, x.options)) for x in launches}

    batches = [([events] * users, [n] * users) for users, events, n in OTHER_SIZES]
    with recorded_launches() as launches:
        for call in program.calls_of(layer().bfloat16()):
            program.run(*call)
        compiled = names(launches)
        step = training_steps("cuda", torch.bfloat16)[name]()
        launches.clear()
        for batch in FIRST_BATCHES + LATER_BATCHES + batches:
            step(*batch)
    assert launches and names(launches) - compiled == set()


def test_the_batches_reach_attention_with_stored_buckets_and_without():
    config = jm.HSTUConfig(scaling_seqlen=512, relative_position=200, relative_time=20)
    layer = jm.HSTULayer(128, 2, config).bfloat16()
    launches = launches_of(layer)
    for kernel in ("fwd", "bwd_dq", "bwd_dkdv"):
        name = f"attention_{kernel}_hopper_kernel"
        kinds = [x.source.constants for x in launches if x.kernel == name]
        stored = {"stored=True" in str(constants) for constants in kinds}
        assert stored == {False, True}
    assert any(x.kernel == "stored_buckets_kernel" for x in launches)


def test_other_versions_are_named_and_not_used(made, tmp_path, unloaded):
    shutil.unpack_archive(made / "kernels.zip", tmp_path)
    manifest = tmp_path / precompiled.MANIFEST
    contents = json.loads(manifest.read_text())
    contents["versions"] |= {"triton": "3.5.1", "python": ".cpython-39-x86_64-linux-gnu.so"}
    manifest.write_text(json.dumps(contents))
    here = precompiled.versions()
    named = f"triton 3.5.1 (here {here['triton']}), python .cpython-39-x86_64-linux-gnu.so (here "
    with pytest.warns(RuntimeWarning) as warnings:
        jm.precompiled(tmp_path)
    assert named in str(warnings[0].message) and "jagged_kernels" not in str(warnings[0].message)
    assert not precompiled._folders


def test_a_missing_kernel_is_named(made, unloaded):
    jm.precompiled(made / "kernels.zip")
    layer = jm.JaggedMLP([16, 16], "silu")
    launch = next(x for x in launches_of(layer) if x.kernel == "activation_fwd_kernel")
    with pytest.warns(RuntimeWarning, match="^activation_fwd_kernel is compiled: .* for other arg"):
        assert precompiled.find(launch.source, launch.target, launch.options) is None
    (launch, *_) = launches_of(jm.JaggedMLP([16, 16], "gelu_tanh"), (8, 0))
    with pytest.warns(RuntimeWarning, match=r"has none for compute capability 8\.0"):
        assert precompiled.find(launch.source, launch.target, launch.options) is None


def test_other_folders_are_refused(tmp_path, unloaded):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="no output of"):
            jm.precompiled(path)


WRONG = """
from torch import nn

def none(): return None
def empty(): return {}
def number(): return {"a": 3}
def layers(): return nn.Linear(2, 2), nn.Linear(2, 2)
"""


@pytest.mark.parametrize(
    "function, error, message",
    [
        ("absent", ValueError, "must be FILE.py:FUNCTION, both existing, got .*wrong.py:absent"),
        ("none", TypeError, "wrong.py:none must return a layer, .* got None"),
        ("empty", ValueError, "wrong.py:empty must return one entry or more, got none"),
        ("number", TypeError, r"\(callable, arguments\), or a list or dict of them, got 3"),
        ("layers", TypeError, r"must return a layer, .* got \(Linear"),
    ],
)
def test_functions_that_make_no_layers(tmp_path, function, error, message):
    (tmp_path / "wrong.py").write_text(WRONG)
    with pytest.raises(error, match=message):
        program.entries_of(f"{tmp_path}/wrong.py:{function}")


@pytest.mark.parametrize("given", ["absent.py:make", "wrong.py"])
def test_names_of_no_function(given):
    with pytest.raises(ValueError, match=f"must be FILE.py:FUNCTION, both existing, got {given}"):
        program.entries_of(given)


def test_a_capability_without_kernels(capsys):
    with pytest.raises(SystemExit):
        program.main(["--capability", "7.5", "--layers", "m.py:make", "--out", "absent.zip"])
    assert "argument --capability: invalid _capability value: '7.5'" in capsys.readouterr().err


def test_configurations(tmp_path):
    """The benchmark's file names the layers of its training steps."""
    entries = program.configured(str(ROOT / "kernels" / "benchmarks" / "first_call.json"))
    names = {name.partition("(")[0] for name in training_steps("cpu", torch.float32)}
    assert {type(layer).__name__ for layer, _ in entries} == names
    assert {next(layer.parameters()).dtype for layer, _ in entries} == {
        torch.bfloat16,
        torch.float32,
    }
    with pytest.raises(TypeError, match="give the arguments of LinearCompressEmbedding"):
        list(program.inputs_of(jm.LinearCompressEmbedding(3, 4, 5), 2, 3, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_runs_the_kernels_of_its_dtype(dtype):
    layer = jm.JaggedGDPA(64, 2)
    with program._autocast(str(dtype).removeprefix("torch.")):
        under_autocast = launches_of(layer)
    attention = [x for x in under_autocast if x.kernel.startswith("attention")]
    assert attention
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    assert all(name in str(launch.source.signature) for launch in attention)
    assert not torch.is_autocast_enabled("cuda")
