"""Makes Triton's interpreter faster. Triton patches `triton.language` anew in each call of a device function, a third of all time."""

import triton.runtime.interpreter as interpreter

_patch_lang, _launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
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


def patch_once_per_launch() -> None:
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = _patch_lang_once, _launch_and_forget
