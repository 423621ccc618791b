"""Errors for keywords of other libraries: they name the argument here."""

from __future__ import annotations

import functools
import inspect
from typing import Any, TypeVar

T = TypeVar("T")

# The keyword of another library, the argument here, and how to write it.
KEYWORDS = {
    "embed_dim": ("embedding_dim", "embedding_dim"),
    "d_model": ("embedding_dim", "embedding_dim"),
    "nhead": ("num_heads", "num_heads"),
    "dim_feedforward": ("ffn_dim", "ffn_dim"),
    "causal": ("mask", "mask=AttentionMask(causal=True)"),
    "is_causal": ("mask", "mask=AttentionMask(causal=True)"),
}


def name_keywords(cls: type[T]) -> type[T]:
    """A decorator of layers: a keyword of `KEYWORDS` raises a TypeError that says what to write."""
    init = cls.__init__
    arguments = inspect.signature(init).parameters

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs.keys() & KEYWORDS.keys():
            argument, written = KEYWORDS[name]
            if name not in arguments and argument in arguments:
                raise TypeError(f"{cls.__name__} has no argument {name}: write {written}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls
