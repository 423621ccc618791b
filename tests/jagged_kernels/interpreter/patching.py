"""Makes Triton's interpreter faster.

Triton patches `triton.language` anew in each call of a device function, a third of all time. It makes a table of all dtypes to look up one,
a tenth of the rest.
"""

import functools

import triton.language as tl
import triton.runtime.interpreter as interpreter

_patch_lang, _launch, _get_np_dtype = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
_np_dtype_of_scalar = functools.cache(_get_np_dtype)
_patched: set[int] = set()  # ids of the globals of modules for which the language is patched


def _patch_lang_once(function):
    if id(function.__globals__) in _patched:
        return interpreter._LangPatchScope()  # of no changes: the launch undoes those that were made
    _patched.add(id(function.__globals__))
    return _patch_lang(function)


def _launch_and_forget(self, *args, **kwargs):
    _patched.clear()
    try:
        return _launch(self, *args, **kwargs)
    finally:
        _patched.clear()  # the launch has undone its patches


def _cached_np_dtype(type):
    return _get_np_dtype(type) if isinstance(type.scalar, tl.pointer_type) else _np_dtype_of_scalar(type.scalar)


def make_faster() -> None:
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _patch_lang_once, _launch_and_forget
    interpreter._get_np_dtype = _cached_np_dtype
