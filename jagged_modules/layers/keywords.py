"""Errors for keywords of other libraries and of a layer's config: they say what to write."""

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
    """A decorator of layers: a keyword of `KEYWORDS` or of the config raises a TypeError."""
    init = cls.__init__
    arguments = inspect.signature(init).parameters
    keywords = {name: how for name, (argument, how) in KEYWORDS.items() if argument in arguments}
    if "config" in arguments:
        config = arguments["config"].annotation.partition(" ")[0]  # "GDPAConfig | None"
        fields = inspect.signature(init.__globals__[config]).parameters
        keywords |= {name: f"config={config}({name}=...)" for name in fields}

    @functools.wraps(init)
    def checked(self: T, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in arguments and name in keywords:
                raise TypeError(f"{cls.__name__} has no argument {name}: write {keywords[name]}")
        init(self, *args, **kwargs)

    cls.__init__ = checked  # type: ignore[method-assign, assignment]
    return cls
