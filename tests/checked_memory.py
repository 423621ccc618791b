"""Makes Triton's interpreter check addresses: a kernel may read and write elements of its tensor
arguments only."""

import bisect
from types import SimpleNamespace

import numpy as np
import torch
import triton.runtime.interpreter as interpreter

_native, _make_arguments = interpreter._interpreter, interpreter.GridExecutor._init_args_hst
# addresses of the tensors of the launch: disjoint ranges, in order
_memory = SimpleNamespace(starts=[], ends=[])


def _tensors(argument):
    if isinstance(argument, tuple):
        for x in argument:
            yield from _tensors(x)
    elif hasattr(argument, "base"):  # a tensor of another dtype, or a descriptor
        yield from _tensors(argument.base)
    elif isinstance(argument, torch.Tensor) and argument.numel():
        yield argument


def _range(x: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _note_arguments(self, arguments, named):
    on_host = _make_arguments(self, arguments, named)
    _memory.starts, _memory.ends = [], []
    for start, end in sorted(_range(x) for x in _tensors((*on_host[0], *on_host[1].values()))):
        if _memory.ends and start <= _memory.ends[-1]:
            _memory.ends[-1] = max(end, _memory.ends[-1])
        else:
            _memory.starts.append(start)
            _memory.ends.append(end)
    return on_host


def _check(what: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
    # A scalar's comparison with a vector's is 0 and 1, which would be indices.
    active = addresses if mask.all() else addresses[mask.astype(bool)]
    if not active.size:
        return
    number = bisect.bisect_right(_memory.starts, int(active.min())) - 1
    if number >= 0 and int(active.max()) + size <= _memory.ends[number]:
        return
    numbers = np.searchsorted(_memory.starts, active, side="right") - 1
    outside = (numbers < 0) | (
        active + np.uint64(size) > np.array(_memory.ends, dtype=np.uint64)[numbers]
    )
    if outside.any():
        address = int(active[outside][0])
        distances = [(abs(address - x), address - x) for x in (*_memory.starts, *_memory.ends)]
        raise AssertionError(
            f"{what} of {outside.sum()} elements of {size} bytes outside of the kernel's tensors, "
            f"{min(distances)[1]:+} bytes from the nearest end of one"
        )


def _load(addresses, mask, other, dtype):
    _check("load", addresses, mask, np.dtype(dtype).itemsize)
    return _native.load(addresses, mask, other, dtype)


def _store(addresses, values, mask):
    _check("store", addresses, mask, values.itemsize)
    return _native.store(addresses, values, mask)


def _atomic_rmw(operation, addresses, values, mask, semantic):
    _check("atomic operation", addresses, mask, values.itemsize)
    return _native.atomic_rmw(operation, addresses, values, mask, semantic)


def _atomic_cas(addresses, compared, values, semantic):
    _check("compare and swap", addresses, np.ones(addresses.shape, bool), values.itemsize)
    return _native.atomic_cas(addresses, compared, values, semantic)


def check_memory() -> None:
    own = dict(load=_load, store=_store, atomic_rmw=_atomic_rmw, atomic_cas=_atomic_cas)
    interpreter._interpreter = SimpleNamespace(
        **{name: getattr(_native, name) for name in dir(_native) if name[0] != "_"} | own
    )
    interpreter.GridExecutor._init_args_hst = _note_arguments
