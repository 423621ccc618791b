"""Runs Gluon kernels on a CPU, one program after another, to check what they compute.

    kernel = emulated("jagged_kernels.din.hopper_forward").din_fwd_hopper_kernel
    kernel[(2,)](descriptor, *tensors, OPTIONS=options)

Triton's interpreter runs no Gluon. Here a kernel's module, and those of ours that it imports, are
executed again with stand-ins for Triton: values are torch tensors (`Value`), pointers a flat tensor
and offsets, shared memory tensors full of NaN. Layouts and registers do not exist, and the warps of
a warpgroup are one. Warpgroups that have code of their own are threads, of which one runs, up to a
barrier that it waits for.

What is asynchronous takes effect as late as it may. An MMA reads its operands where it is awaited.
A load by TMA writes NaN where it starts, and the data where its barrier is awaited. This finds a
buffer that is written while an MMA or another warpgroup may still read it, or read before it is
loaded; a result that is used before it is awaited; warpgroups that wait for one another. It does
not find a barrier or a fence that is missing between the warps of a warpgroup.
"""

from __future__ import annotations

import ast
import builtins
import collections
import functools
import importlib
import importlib.util
import math
import operator
import re
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

UINT32, WORD = object(), 2**32 - 1  # values of this dtype are int64


def raw(x: Any) -> Any:
    """The torch tensor or number of a Value."""
    return x.data if isinstance(x, Value) else x


class _Type:
    """What a kernel asks of the type of a value or pointer."""

    layout = None

    def __init__(self, dtype: torch.dtype):
        self.element_ty = dtype


def _operator(name: str) -> Callable:
    function = getattr(operator, name)

    def forward(x, y):
        if isinstance(y, Pointer):
            return NotImplemented
        return Value(function(raw(x), raw(y)))

    return forward


def _reflected(name: str) -> Callable:
    function = getattr(operator, name)
    return lambda x, y: Value(function(raw(y), raw(x)))


class Value:
    """A tensor or scalar in registers."""

    type = property(lambda self: _Type(self.data.dtype))
    dtype = property(lambda self: self.data.dtype)
    shape = property(lambda self: list(self.data.shape))

    def __init__(self, data: Any):
        self._data = torch.as_tensor(raw(data))

    @property
    def data(self) -> Tensor:
        return self._data

    def to(self, dtype):
        if dtype is UINT32:
            return Value(self.data.to(torch.int64) & WORD)
        return Value(self.data.to(dtype))

    def reshape(self, shape):
        return Value(self.data.reshape([int(x) for x in shape]))

    def permute(self, order):
        return Value(self.data.permute(tuple(order)))

    def broadcast_to(self, shape):
        return Value(self.data.broadcast_to([int(x) for x in shape]))

    def split(self):
        return tuple(Value(x) for x in self.data.unbind(-1))

    def __getitem__(self, index):
        return Value(self.data[index])

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)

    def __neg__(self):
        return Value(-self.data)

    def __invert__(self):
        return Value(~self.data)

    def __pow__(self, other):
        return Value(self.data ** raw(other))


for _name in "add sub mul truediv floordiv mod and_ or_ xor lshift rshift".split():
    _magic = _name.strip("_")
    setattr(Value, f"__{_magic}__", _operator(_name))
    setattr(Value, f"__r{_magic}__", _reflected(_name))
for _name in "lt le gt ge eq ne".split():
    setattr(Value, f"__{_name}__", _operator(_name))
Value.__hash__ = None  # type: ignore[assignment]


class Pending(Value):
    """The result of an MMA."""

    def __init__(self, compute: Callable[[], Tensor]):
        self._data, self.compute = None, compute

    @property
    def data(self) -> Tensor:
        assert self._data is not None, "the result of an MMA is read before it is awaited"
        return self._data

    def finish(self) -> None:
        if self._data is None:
            self._data = self.compute()


class Pointer:
    """Elements of a tensor's memory."""

    def __init__(self, flat: Tensor, offset: Any = 0):
        self.flat, self.offset = flat, offset

    dtype = property(lambda self: _Type(self.flat.dtype))

    def __add__(self, other):
        return Pointer(self.flat, self.offset + raw(other))

    __radd__ = __add__


class Shared:
    """Shared memory."""

    def __init__(self, data: Tensor):
        self.data = data

    shape = property(lambda self: list(self.data.shape))
    dtype = property(lambda self: self.data.dtype)

    def index(self, i):
        return Shared(self.data[int(raw(i))])

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, int(start), int(length)))

    def permute(self, order):
        return Shared(self.data.permute(tuple(order)))

    def reshape(self, shape):
        return Shared(self.data.view([int(x) for x in shape]))

    def load(self, layout=None):
        return Value(self.data.clone())

    def store(self, x):
        self.data.copy_(raw(x).broadcast_to(self.data.shape))


class Descriptor:
    """A TMA descriptor of x; elements outside read as 0, and are not written."""

    def __init__(self, x: Tensor, *box: int):
        self.x, self.dtype, self.layout = x.detach(), x.dtype, None
        self.shape = [Value(size) for size in x.shape]
        nbytes = math.prod(box) * x.element_size()
        self.block_type = types.SimpleNamespace(shape=list(box), nbytes=nbytes)

    def part(self, coordinates, shape) -> tuple[Tensor, tuple[slice, ...]]:
        """The part of x that a box covers, and where it is in the box."""
        firsts = [int(raw(x)) for x in coordinates]
        wanted = [slice(first, first + size) for first, size in zip(firsts, shape)]
        part = self.x[tuple(wanted)]
        return part, tuple(slice(0, size) for size in part.shape)


# -- what is asynchronous --------------------------------------------------------------------------


class Warpgroups(threading.Condition):
    """Threads of which one runs: who holds this lock."""

    def __init__(self):
        super().__init__()
        self.alive, self.waiting, self.error = 0, {}, None

    def run(self, partitions) -> None:
        threads = [threading.Thread(target=self._run, args=part) for part in partitions]
        self.alive, self.error = len(threads), None
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.alive = 0
        if self.error is not None:
            raise self.error

    def _run(self, function, arguments) -> None:
        with self:
            try:
                function(*arguments)
                assert not _mmas(), "an MMA is not awaited"
            except BaseException as error:  # noqa: BLE001 raised by `run`
                self.error = self.error or error
            self.alive -= 1
            self.check()

    def wait_for_phase(self, barrier: Barrier, parity: int) -> None:
        barrier.load()
        while barrier.phase & 1 == parity:
            assert self.alive, "waits for ever"
            self.waiting[threading.get_ident()] = barrier, parity
            self.check()
            assert self.error is None, "another warpgroup failed"
            self.wait()
            del self.waiting[threading.get_ident()]
            barrier.load()

    def check(self) -> None:
        """Wake all, unless all wait for ever."""
        stuck = [barrier.phase & 1 == parity for barrier, parity in self.waiting.values()]
        loads = any(barrier.loads for barrier, _ in self.waiting.values())
        if self.alive and sum(stuck) == self.alive and not loads:
            self.error = self.error or AssertionError("all warpgroups wait for one another")
        self.notify_all()


class Barrier:
    """An mbarrier. phase: how many it has completed. loads: by TMA, which have started."""

    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0
        self.loads: list[Callable[[], int]] = []

    def arrive(self, arrivals: int, nbytes: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += nbytes
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, self.count
            warpgroups.notify_all() if warpgroups.alive else None

    def load(self) -> None:
        loads, self.loads = self.loads, []
        for load in loads:
            self.arrive(0, -load())


class Barriers:
    def __init__(self, number: int):
        self.items, self.shape = [Barrier() for _ in range(number)], [number, 1]

    def index(self, i):
        return self.items[int(raw(i))]


BARRIERS = object()  # the layout of memory for them
warpgroups = Warpgroups()
state = types.SimpleNamespace(mmas={}, program=0, programs=1)  # of the launch


def _mmas() -> collections.deque[Pending]:
    """Those that the warpgroup has started and not awaited."""
    return state.mmas.setdefault(threading.get_ident(), collections.deque())


def _init(barrier, count):
    barrier.count = barrier.pending = int(raw(count))


def _expect(barrier, nbytes, pred=True):
    if raw(pred):
        barrier.arrive(1, int(raw(nbytes)))


def _arrive(barrier, count=1, pred=True):
    if raw(pred):
        barrier.arrive(int(raw(count)))


def _wait_for(barrier, phase, pred=True):
    if raw(pred):
        warpgroups.wait_for_phase(barrier, int(raw(phase)) & 1)


def _load_tile(desc, coordinates, barrier, buffer, pred=True):
    if not raw(pred):
        return
    part, inside = desc.part(coordinates, buffer.shape)

    def load() -> int:
        buffer.data.zero_()
        buffer.data[inside] = part
        return desc.block_type.nbytes

    buffer.data.fill_(math.nan)
    barrier.loads.append(load)


def _store_tile(desc, coordinates, buffer):
    part, inside = desc.part(coordinates, buffer.shape)
    part.copy_(buffer.data[inside])


def _add_tile(desc, coordinates, buffer):
    part, inside = desc.part(coordinates, buffer.shape)
    part += buffer.data[inside]


def _mma(a, b, acc, use_acc=True, is_async=False):
    def compute() -> Tensor:
        product = a.data.float() @ b.data.float()
        return product + acc.data if raw(use_acc) else product

    if isinstance(a, Value):  # in registers: it may not be the result of an MMA under way
        a = Value(a)
    result = Pending(compute)
    _mmas().append(result)
    if not is_async:
        _wait(0, ())
    return result


def _wait(number, deps):
    mmas = _mmas()
    while len(mmas) > number:
        mmas.popleft().finish()
    return deps if len(deps) != 1 else deps[0]


# -- operations ------------------------------------------------------------------------------------


def load(ptr, mask=None, other=None):
    offset = torch.as_tensor(ptr.offset)
    if mask is None:
        return Value(ptr.flat[offset].clone())
    offset, mask = torch.broadcast_tensors(offset, raw(mask))
    found = torch.full(offset.shape, 0 if other is None else other, dtype=ptr.flat.dtype)
    found[mask] = ptr.flat[offset[mask]]
    return Value(found)


def store(ptr, x, mask=None):
    given = torch.as_tensor(raw(x)), torch.as_tensor(ptr.offset)
    mask = torch.as_tensor(True) if mask is None else raw(mask)
    x, offset, mask = torch.broadcast_tensors(*given, mask)
    ptr.flat[offset[mask]] = x[mask].to(ptr.flat.dtype)


def _reduction(function: Callable) -> Callable:
    return lambda x, axis=None: Value(
        function(x.data, axis) if axis is not None else function(x.data)
    )


def _elementwise(function: Callable) -> Callable:
    return lambda *xs, **_: Value(function(*(torch.as_tensor(raw(x)) for x in xs)))


ASSEMBLY = {  # by a part of its text
    "tanh.approx.f32": torch.tanh,
    "rcp.approx": torch.reciprocal,
    "lg2.approx": torch.log2,
    "shfl.sync.idx": lambda x: x,
    "fence.proxy.async; mov": lambda x: x,
    "bulk.wait_group 0; mov": lambda x: x,
    "cvt.rn.relu.bf16x2": lambda z: torch.relu(z).bfloat16(),
    "fma.rn.bf16x2": lambda x, y, z: (x.double() * y.double() + z.double()).bfloat16(),
    "setp.gt.f32": lambda z, x, slope: torch.where(z > 0, x, slope * x),
    "setp.gt.bf16x2": lambda h, dh: torch.where(h > 0, dh, 0.0),
}


def atomic_add(ptr, x, mask=None, sem=None):
    old = load(ptr)
    store(ptr, old + x)
    return old


def _upper_word(x, y):
    """The upper word of the product of two words."""
    return (((raw(x) >> 16) * y + ((raw(x) & 0xFFFF) * y >> 16)) >> 16) & WORD


def _modulo_words(function):
    return lambda x, y, sanitize_overflow=False: Value(function(raw(x), raw(y)) & WORD)


def _acquire(ptr):
    """The others run before a loop reads again."""
    if warpgroups.alive:
        warpgroups.wait(0.001)
    return load(ptr)


def assembly(text, constraints, args, dtype, is_pure, pack):
    if "ld.acquire" in text:
        return _acquire(*args)
    (function,) = (f for part, f in ASSEMBLY.items() if part in text)
    xs = torch.broadcast_tensors(*(torch.as_tensor(raw(x)) for x in args))
    return Value(function(*xs).to(dtype))


def _maximum(x, y, propagate_nan=None):
    x, y = torch.as_tensor(raw(x)), torch.as_tensor(raw(y))
    return Value(torch.maximum(x, y) if propagate_nan is not None else torch.fmax(x, y))


def _decorator(*args, **options):
    return args[0] if args and callable(args[0]) else lambda function: function


def _allocate(dtype, shape, layout):
    if layout is BARRIERS:
        return Barriers(shape[0])
    data = torch.empty([int(x) for x in shape], dtype=dtype)
    return Shared(data.fill_(math.nan) if dtype.is_floating_point else data.zero_())


class _Anything:
    """What has no meaning here: layouts, barriers, types in annotations."""

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self


def _full(shape, value, dtype, layout=None):
    return Value(torch.full([int(x) for x in shape], value, dtype=dtype))


_nothing = _Anything()
_language: dict[str, Any] = dict(
    constexpr=lambda x: x, tensor=Value, tuple=tuple, shared_memory_descriptor=Shared,
    int1=torch.bool, int32=torch.int32, int64=torch.int64, float32=torch.float32,
    bfloat16=torch.bfloat16, float16=torch.float16, PropagateNan=types.SimpleNamespace(ALL=True),
    load=load, store=store, atomic_add=atomic_add,
    sum=_reduction(torch.sum), max=_reduction(torch.amax),
    exp=_elementwise(torch.exp), exp2=_elementwise(torch.exp2), log=_elementwise(torch.log),
    abs=_elementwise(torch.abs), where=_elementwise(torch.where), maximum=_maximum,
    minimum=_elementwise(torch.fmin), cast=lambda x, dtype: Value(x).to(dtype),
    cdiv=lambda x, y: (x + y - 1) // y, zeros=lambda s, d, layout=None: _full(s, 0.0, d),
    full=_full, arange=lambda a, b, layout=None: Value(torch.arange(a, b)),
    program_id=lambda axis: Value(state.program), num_programs=lambda axis: Value(state.programs),
    static_range=range, inline_asm_elementwise=assembly, allocate_shared_memory=_allocate,
    convert_layout=lambda x, layout, assert_trivial=False: x, num_warps=lambda: 4,
    uint32=UINT32, add=_modulo_words(operator.add), mul=_modulo_words(operator.mul),
    umulhi=lambda x, y: Value(_upper_word(x, y)),
    broadcast=lambda *xs: tuple(map(Value, torch.broadcast_tensors(*(x.data for x in xs)))),
    multiple_of=lambda x, n: x, warp_specialize=lambda parts, *_: warpgroups.run(parts),
    to_tensor=Value, min=_reduction(torch.amin), uint8=torch.uint8, int16=torch.int16,
    join=lambda x, y: Value(torch.stack([x.data, y.data], -1)), split=lambda x: x.split(),
)  # fmt: skip


def _missing(*args, **options):
    raise NotImplementedError("not emulated")


class _Module(types.ModuleType):
    """A stand-in of a module of Triton. Classes that it lacks, as layouts, have no meaning here."""

    def __init__(self, name: str, **items: Any):
        super().__init__(name)
        self.__dict__.update(items, __path__=[])

    def __getattr__(self, name):
        if name.islower():
            raise AttributeError(f"{self.__name__}.{name} is not emulated")
        return _nothing


_gl = _Module("language", **_language)
_jit = dict(jit=_decorator, constexpr_function=_decorator, language=_gl)
_mbarrier = _Module("mbarrier", init=_init, expect=_expect, arrive=_arrive, wait=_wait_for)
_mbarrier.MBarrierLayout = lambda: BARRIERS
_hopper = dict(warpgroup_mma=_mma, warpgroup_mma_wait=_wait, warpgroup_mma_init=lambda x: x)
_hopper |= dict(mbarrier=_mbarrier, fence_async_shared=_nothing, tma=_nothing)
_api = dict(load_tile=_load_tile, store_tile=_store_tile, add_tile=_add_tile)
_api |= dict(thread_barrier=_nothing, reinterpret=_missing, reinterprets_padding=True)
_of_host = dict.fromkeys(["fill", "heads_first", "shape_and_strides"], _nothing)
_of_host |= dict(Described=type("Described", (), {}))
STANDINS = {
    "triton": _Module("triton", **_jit, JITFunction=types.FunctionType),
    "triton.language": _gl,
    "triton.experimental": _Module("experimental", gluon=_Module("gluon", **_jit)),
    "triton.experimental.gluon": _Module("gluon", **_jit),
    "triton.experimental.gluon.language": _gl,
    "triton.experimental.gluon.language.nvidia.hopper": _Module("hopper", **_hopper),
    "triton.experimental.gluon.nvidia": _Module(
        "nvidia", hopper=types.SimpleNamespace(TensorDescriptor=object)
    ),
    "jagged_kernels.common.ptxas": _Module("ptxas", safe_ptxas=_decorator),
    "jagged_kernels.common.gluon_api": _Module("gluon_api", **_api),
    "jagged_kernels.common.descriptors": _Module("descriptors", **_of_host),
}


# -- modules ---------------------------------------------------------------------------------------


class _Tuples(ast.NodeTransformer):
    """Triton has no lists: they are tuples."""

    def visit_ListComp(self, node):  # noqa: N802
        self.generic_visit(node)
        items = ast.GeneratorExp(node.elt, node.generators)
        return ast.Call(ast.Name("tuple", ast.Load()), [items], [])


def _range(*args):
    """Rounds of a kernel's loop have Values."""
    return map(Value, range(*args))


@functools.cache
def emulated(name: str) -> types.ModuleType:
    """A module of the kernels, whose functions compute here and whose kernels can be launched."""
    if name in STANDINS:
        return STANDINS[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None
    with open(spec.origin) as file:
        source = file.read()
    if not re.search(r"^(?:import|from) triton", source, re.MULTILINE):
        return importlib.import_module(name)
    module = types.ModuleType(name)
    module.__package__, module.__file__ = spec.parent, spec.origin

    def imported(wanted, given=None, locals=None, names=(), level=0):
        if level:
            parents = spec.parent.split(".")
            wanted = ".".join(parents[: len(parents) - level + 1] + ([wanted] if wanted else []))
        if wanted in STANDINS or wanted.startswith("jagged_kernels"):
            whole = wanted if names or "." not in wanted else wanted.split(".")[0]
            return _of_package(whole, names)
        return builtins.__import__(wanted, given, locals, names, 0)

    module.__dict__["__builtins__"] = {**vars(builtins), "__import__": imported, "range": _range}
    tree = ast.fix_missing_locations(_Tuples().visit(ast.parse(source)))
    exec(compile(tree, spec.origin, "exec"), module.__dict__)
    for key, x in list(vars(module).items()):
        if key.endswith("_kernel") and callable(x) and x.__module__ == name:
            setattr(module, key, Launchable(x))
    return module


def _of_package(name: str, names) -> types.ModuleType:
    found = emulated(name)
    missing = [x for x in names or () if not hasattr(found, x)]
    if missing:  # submodules
        found = types.SimpleNamespace(
            **vars(found), **{x: emulated(f"{name}.{x}") for x in missing}
        )
    return found


class Launchable:
    """A kernel that is launched as Triton's are."""

    def __init__(self, function: Callable):
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable:
        def launch(*args, num_warps=None, num_stages=None, maxnreg=None, **constants):
            if activation := constants.get("ACTIVATION"):
                where = emulated("jagged_kernels.common.activations")
                constants["ACTIVATION"] = getattr(where, activation.__name__)
            given, state.programs = _given(args), grid[0]
            for state.program in range(grid[0]):
                state.mmas.clear()
                self.function(*given, **constants)

        return launch


def _given(x: Any) -> Any:
    """An argument as a kernel has it."""
    if isinstance(x, Tensor):
        x = x.detach()
        return Pointer(x.view(-1) if x.is_contiguous() else _storage(x))
    if isinstance(x, tuple):
        items = [_given(y) for y in x]
        return type(x)(*items) if hasattr(x, "_fields") else tuple(items)
    return Value(x) if type(x) is int else x


def _storage(x: Tensor) -> Tensor:
    last = sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return x.as_strided((last + 1,), (1,))
