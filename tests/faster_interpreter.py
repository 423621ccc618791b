"""Makes Triton's interpreter faster.

Triton patches `triton.language` anew in each call of a device function, a third of all time. It
makes a table of all dtypes to look up one, a tenth of the rest. It computes sums, differences and
products of integers twice, to assert that none overflows, two fifths of what then remains; the
assertion does nothing without debug=True. Each tensor's shape gets a type, which nothing asks for.
The type of each result checks its shape and formats its name anew, and each call of a builtin
passes through two wrappers: a quarter of the rest.
"""

import builtins
import dataclasses
import functools
import math

import triton.language as tl
import triton.runtime.interpreter as interpreter
from triton.language import core

_patch_lang = interpreter._patch_lang
_launch = interpreter.GridExecutor.__call__
_get_np_dtype = interpreter._get_np_dtype
_np_dtype_of_scalar = functools.cache(_get_np_dtype)
_make_tuple, _make_block_type = core.tuple.__init__, core.block_type.__init__
_unwrap, _is_same_type = core._unwrap_if_constexpr, core.dtype.__eq__
_patched: set[int] = set()  # ids of the globals of modules for which the language is patched
# (id of the element's type, shape) → a block type's fields, which keep that id in use
_block_types: dict[tuple, dict] = {}


def _patch_lang_once(function):
    if id(function.__globals__) in _patched:
        # of no changes: the launch undoes those that were made
        return interpreter._LangPatchScope()
    _patched.add(id(function.__globals__))
    return _patch_lang(function)


def _launch_and_forget(self, *args, **kwargs):
    _patched.clear()
    try:
        return _launch(self, *args, **kwargs)
    finally:
        _patched.clear()  # the launch has undone its patches
        _block_types.clear()  # types of pointers are made anew for each launch


def _patch_builtin(owner, name, member, builder, scope):
    function, semantic = getattr(member, "__wrapped__", member), interpreter.TritonSemantic(builder)

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, call)


def _cached_np_dtype(type):
    return (
        _get_np_dtype(type)
        if isinstance(type.scalar, tl.pointer_type)
        else _np_dtype_of_scalar(type.scalar)
    )


class _TypeWhenAsked:
    """tl.tuple.type, found at its first use. Its values do not change: the interpreter makes new
    tuples."""

    def __get__(self, instance, owner):
        instance.type = type = core._type_for_tuple_values(instance.values)
        return type


def _make_tuple_without_type(self, args, type=None):
    if type is None:
        self.values = list(args)
    else:
        _make_tuple(self, args, type)


@functools.cache
def _constexpr_shape(sizes):
    return core.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))


def _make_block_type_once(self, element_ty, shape):
    key = id(element_ty), *shape
    fields = _block_types.get(key)
    if fields is None:
        _make_block_type(self, element_ty, shape)
        _block_types[key] = self.__dict__
    else:
        self.__dict__ = fields  # a type does not change


@functools.cache
def _may_hold_constants(kind: type) -> bool:
    return issubclass(kind, list | builtins.tuple | core.tuple | tl.constexpr)


def _unwrap_at_once(value):
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return _unwrap(value) if _may_hold_constants(kind) else value


def _same_type(self, other):
    return self is other or _is_same_type(self, other)


def _make_tensor(self, handle, type):
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _constexpr_shape(builtins.tuple(type.shape) if type.is_block() else ())


def make_faster() -> None:
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = (
        _patch_lang_once,
        _launch_and_forget,
    )
    interpreter._get_np_dtype, interpreter._patch_attr = _cached_np_dtype, _patch_builtin
    options = interpreter.interpreter_builder.options
    interpreter.interpreter_builder.options = dataclasses.replace(
        options, sanitize_overflow=options.debug
    )
    core.tuple.__init__, core.tuple.type = _make_tuple_without_type, _TypeWhenAsked()
    core.block_type.__init__, core._unwrap_if_constexpr = _make_block_type_once, _unwrap_at_once
    core.dtype.__eq__, core.tensor.__init__ = _same_type, _make_tensor
