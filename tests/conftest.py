"""What the tests of all packages share: offsets from lengths, a fixed budget for hypothesis, the
gpu mark."""

import gc
import os
import tempfile
from pathlib import Path

gc.disable()  # until the tests are collected: imports and parameters make a million objects

import accuracy
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import jagged_modules as jm
from jagged_modules.captured_step import RUNNERS

from . import faster_export, gpu_suite, warm
from .direct_graphs import Direct
from .distributed.ranks import Ranks

# Neither a deadline nor the check of slow strategies: a busy machine would fail.
no_clock = dict(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", derandomize=True, max_examples=30, **no_clock)
settings.load_profile("repeatable")

# Inductor's cache does not tell the code of one vector width from that of another, which
# ATEN_CPU_CAPABILITY may choose.
INDUCTOR_CACHE = (
    Path(tempfile.gettempdir())
    / f"inductor-{os.getuid()}-{torch.backends.cpu.get_cpu_capability()}"
)
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(INDUCTOR_CACHE))
# The processor says which vectors it has. To ask g++ too takes 7 s in a new environment.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
faster_export.make_faster()


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def few_collections():
    """Garbage collections do not visit the objects of imports, and are rare: torch.export and
    torch.compile make so many objects that a tenth of their time would be collections."""
    gc.collect()
    gc.freeze()
    gc.enable()
    if not torch.cuda.is_available():  # whose memory garbage may hold
        gc.set_threshold(100_000)


@pytest.fixture
def one_thread():
    """Each thread of torch's fused attention has scratch memory of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def poisoned_memory():
    """torch.empty returns NaN, so that an element that nothing wrote is seen."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def padded(monkeypatch):
    """`Direct` takes the place of CUDA graphs on the CPU."""
    monkeypatch.setitem(RUNNERS, "cpu", Direct)


@pytest.fixture(scope="session")
def two_ranks():
    """Two processes of one gloo group: `two_ranks.run(function, *args)`."""
    ranks = Ranks(2)
    yield ranks
    ranks.stop()


@pytest.fixture(scope="module")
def two_gpus():
    """Two processes of one NCCL group, each with a GPU: `two_gpus.run(function, *args)`."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    ranks = Ranks(2, "cuda")
    yield ranks
    ranks.stop()


@pytest.fixture
def trains_tables_on_gpus():
    pytest.importorskip("torchrec")
    if not hasattr(torch.ops.fbgemm, "split_embedding_codegen_lookup_rowwise_adagrad_function"):
        pytest.skip("fbgemm_gpu lacks the libraries that train sharded tables")


@pytest.fixture
def gpu_group(tmp_path, trains_tables_on_gpus):
    """The device "cuda", in an NCCL group of this process alone."""
    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield "cuda"
    torch.distributed.destroy_process_group()


@pytest.fixture
def compiled_kernels(monkeypatch):
    """Names of the kernels that are compiled or loaded from Triton's disk cache during the test."""
    knobs = pytest.importorskip("triton").knobs
    names, before = [], knobs.compilation.listener

    def note(**what):
        names.append(what["src"].name)
        return before(**what) if before else None

    monkeypatch.setattr(knobs.compilation, "listener", note)
    return names


def _offsets(lengths, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.cat(
        [
            torch.zeros(1, dtype=dtype),
            torch.tensor(list(lengths), dtype=dtype).cumsum(0, dtype=dtype),
        ]
    )


@pytest.fixture(scope="session")
def offsets_of():
    """lengths, dtype → offsets `[B + 1]`."""
    return _offsets


@pytest.fixture(
    params=[
        "pair",
        "list",
        "Jagged",
        "nested",
        "JaggedTensor",
        "JaggedTensor-offsets",
        "KeyedJaggedTensor",
        "KeyedJaggedTensor-keys",
    ]
)
def container(request):
    """values, offsets of three segments → the same in one kind of container; the test runs with
    each of them."""
    torchrec = pytest.importorskip("torchrec") if "JaggedTensor" in request.param else None
    return {
        "pair": lambda values, offsets: (values, offsets),
        "list": lambda values, offsets: [values, offsets],
        "Jagged": jm.Jagged,
        "nested": torch.nested.nested_tensor_from_jagged,
        "JaggedTensor": lambda values, offsets: torchrec.JaggedTensor(
            values, lengths=offsets.diff()
        ),
        "JaggedTensor-offsets": lambda values, offsets: torchrec.JaggedTensor(
            values, offsets=offsets
        ),
        "KeyedJaggedTensor": lambda values, offsets: torchrec.KeyedJaggedTensor(
            ["a"], values, lengths=offsets.diff()
        ),
        "KeyedJaggedTensor-keys": lambda values, offsets: torchrec.KeyedJaggedTensor(
            ["a", "b", "c"], values, lengths=offsets.diff()
        ),
    }[request.param]


def _assert_one_key(attend, q_lengths, dtype, device="cpu", dim=24) -> None:
    """`attend(q, k, v, q_offsets, kv_offsets)` where every segment has one key: out = v exactly,
    and gradients by the accuracy rule. dq and dk are 0 except for the rounding of dP and rowsum(dO
    ∘ O)."""
    user = torch.arange(len(q_lengths), device=device).repeat_interleave(
        torch.tensor(q_lengths, device=device)
    )
    offsets = [_offsets(x).to(device) for x in (q_lengths, [1] * len(q_lengths))]
    q, k, v = (
        torch.randn(n, 2, dim, device=device).to(dtype)
        for n in (len(user), len(q_lengths), len(q_lengths))
    )
    accuracy.check(
        lambda *x: attend(*x, *offsets),
        lambda *x: accuracy.attention(*x, *offsets),
        dict(q=q, k=k, v=v),
    )
    assert torch.equal(attend(q, k, v, *offsets), v[user])


@pytest.fixture(scope="session")
def assert_one_key():
    return _assert_one_key


class _TensorSizes(TorchDispatchMode):
    """Records in `made` the number of elements of every tensor that an operator allocates. Views
    allocate none."""

    def __init__(self):
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        given = {
            x.untyped_storage().data_ptr()
            for x in tree_leaves((args, kwargs))
            if isinstance(x, torch.Tensor)
        }
        made = [
            x
            for x in tree_leaves(out)
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in given
        ]
        self.made += [x.untyped_storage().nbytes() // x.element_size() for x in made]
        return out


@pytest.fixture(scope="session")
def tensor_sizes():
    """A mode, `with tensor_sizes() as sizes`, in which sizes.made lists the number of elements of
    every tensor that is made."""
    return _TensorSizes


class _SavedTensors(torch.autograd.graph.saved_tensors_hooks):
    """Records in `storages`, by address, the number of elements of everything that autograd keeps
    for a backward."""

    def __init__(self):
        super().__init__(self._note, lambda x: x)
        self.storages: dict[int, int] = {}

    def __enter__(self):
        super().__enter__()
        return self

    def _note(self, x):
        self.storages[x.untyped_storage().data_ptr()] = (
            x.untyped_storage().nbytes() // x.element_size()
        )
        return x


@pytest.fixture(scope="session")
def saved_tensors():
    """A context, `with saved_tensors() as saved`, in which saved.storages lists what is kept for a
    backward, as {address: elements}."""
    return _SavedTensors


def pytest_addoption(parser):
    parser.addoption(
        "--gpu-suite",
        action="store_true",
        help="run the tests that need a GPU, as tests/gpu_suite.py says",
    )
    parser.addoption(
        "--all-combinations",
        action="store_true",
        help="with --gpu-suite, run tests with all combinations of their parameters' values",
    )
    parser.addoption(
        "--each-kernel-once",
        action="store_true",
        help="of the tests in jagged_kernels/compile, run a sample that compiles each kernel",
    )


def pytest_configure(config):
    if config.getoption("--gpu-suite"):
        gpu_suite.register(config)


def pytest_collection_modifyitems(items):
    """Leaves out tests whose module says that their parameters never apply. Skips tests that need a
    GPU if there is none."""
    items[:] = [item for item in items if _applies(item)]
    for item in items:
        if " at 0x" in item.nodeid:  # xdist's processes would collect different tests
            raise pytest.UsageError(f"a test's name must have no address, got {item.nodeid}")
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish(session):
    """What programs are forks of imports while the first tests run."""
    if any(
        "two_ranks" in item.fixturenames or vars(item.module).get("warm") is warm
        for item in session.items
    ):
        warm.begin()


def _applies(item) -> bool:
    rule = getattr(item.module, "applies", None)
    return rule is None or not hasattr(item, "callspec") or rule(**item.callspec.params)
