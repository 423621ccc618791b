"""The pages argument of attention: its checks, and the gather where no kernel reads pages."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch
from jagged_kernels.attention.pages import SMALLEST_PAGE, Pages
from torch import Tensor

from ..containers.pages import DTYPES_OF_8_BITS, gather_keys
from ..dtypes import autocast_dtype, names
from ..scalars import check_equal, check_kind, check_size
from ..segments import (
    check_device,
    check_offsets,
    check_offsets_shape,
    normal_form,
    values_are_checkable,
)

if TYPE_CHECKING:
    from ..segments import RowSegments
    from .attention_arguments import Side
    from .attention_call import AttentionOptions


def check_pages(
    pages: Pages,
    operands: tuple[Tensor, Tensor, Tensor],
    queries: Side | RowSegments,
    keys: Side | RowSegments,
    options: AttentionOptions,
) -> None:
    """Check pages against the other arguments of attention."""
    (q, k, v), bias = operands, options.bias
    q_offsets, kv_offsets = queries.offsets, keys.offsets
    check_kind("pages", pages, Pages, "a Pages")
    check_size("pages.num_rows", pages.num_rows, at_least=0)
    if isinstance(q_offsets, str) or isinstance(kv_offsets, str):
        raise ValueError("pages must be None where segments share queries or keys")
    check_offsets_shape("q_offsets", q_offsets)
    check_offsets("kv_offsets", kv_offsets, pages.num_rows)
    check_device("kv_offsets", kv_offsets, q.device, "q's")
    if q_offsets.shape != kv_offsets.shape:
        raise ValueError(
            f"pages must be None with several query groups, got {q_offsets.shape[0] - 1} and"
            f" {kv_offsets.shape[0] - 1} segments"
        )
    if torch.is_grad_enabled():
        tables = () if bias is None else (bias.position, bias.time)
        if any(
            isinstance(x, Tensor) and x.requires_grad
            for x in (q, k, v, options.output_scale, *tables)
        ):
            raise RuntimeError(
                "attention with pages has no gradient: call it under torch.no_grad(), or gather the"
                " keys and values first"
            )
    check_size("pages.page_rows", pages.page_rows, at_least=SMALLEST_PAGE)
    if pages.page_rows & (pages.page_rows - 1):
        raise ValueError(f"pages.page_rows must be a power of 2, got {pages.page_rows}")
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] % pages.page_rows:
            raise ValueError(
                f"{name} must have a multiple of pages.page_rows, {pages.page_rows}, rows, got"
                f" {x.shape[0]}"
            )
        if x.stride(2) != 1 and x.shape[2] > 1:
            raise ValueError(
                f"{name}'s last dimension must be contiguous with pages, got strides {x.stride()}"
            )
    check_equal("v", "have k's rows", k.shape[0], v.shape[0])
    if pages.scales is not None:
        _check_scales(pages.scales, k, v)
    table, entries = pages.table, pages.num_rows // pages.page_rows + kv_offsets.shape[0] - 1
    check_kind("pages.table", table, Tensor, "a torch.Tensor")
    if table.dtype != torch.int32 or table.shape != (entries,):
        raise ValueError(
            f"pages.table must be int32 [num_rows // page_rows + B] = [{entries}], got"
            f" {table.dtype} {list(table.shape)}"
        )
    check_device("pages.table", table, k.device, "k's")
    if pages.num_rows and values_are_checkable(table):
        wrong = table[(table < 0) | (table >= k.shape[0] // pages.page_rows)]
        if wrong.numel():
            raise ValueError(
                f"pages.table must have pages 0 to {k.shape[0] // pages.page_rows - 1}, got"
                f" {int(wrong[0])}"
            )


def _check_scales(scales: Tensor, k: Tensor, v: Tensor) -> None:
    check_kind("pages.scales", scales, Tensor, "a torch.Tensor")
    for name, x in (("k", k), ("v", v)):
        if x.dtype not in DTYPES_OF_8_BITS:
            raise ValueError(
                f"{name} must be {names(DTYPES_OF_8_BITS)} with pages.scales, got {x.dtype}"
            )
    if scales.dtype != torch.float32 or scales.shape != k.shape[:2]:
        raise ValueError(
            f"pages.scales must be float32 with k's rows and heads, {list(k.shape[:2])}, got"
            f" {scales.dtype} {list(scales.shape)}"
        )
    check_device("pages.scales", scales, k.device, "k's")


def readable_keys(
    pages: Pages, kv_offsets: Tensor, operands: tuple[Tensor, Tensor, Tensor], implementation: str
) -> tuple[Tensor, Tensor, Pages | None]:
    """k, v and pages as the implementation reads them: where no kernel reads pages, the gathered
    rows and None."""
    q, k, v = operands
    on_cpu = implementation == "auto" and not q.is_cuda
    changes = pages.scales is None and autocast_dtype(k) != k.dtype
    if implementation == "reference" or on_cpu or changes:
        k, v = gather_keys(pages, kv_offsets, autocast_dtype(q), k, v)
        return k, v, None
    return k, v, dataclasses.replace(pages, table=normal_form(pages.table, k.device))
