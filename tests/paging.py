"""Rows of segments put into pages, for tests of attention that reads pages."""

import dataclasses

import torch

import jagged_modules as jm
from jagged_modules.containers.pages import from_8_bits, in_8_bits


def in_pages(
    rows: torch.Tensor, lengths: list[int], page_rows: int = 128
) -> tuple[torch.Tensor, jm.Pages]:
    """The storage, a strided view of one that has two layers, and its pages. Pages are in random
    order; all other rows are NaN."""
    counts = [-(-n // page_rows) for n in lengths]
    numbers = torch.randperm(sum(counts) + 2).tolist()
    pages = [[numbers.pop() for _ in range(count)] for count in counts]
    storage = rows.new_full(((sum(counts) + 2) * page_rows, 2, *rows.shape[1:]), float("nan"))
    index = [
        own[i // page_rows] * page_rows + i % page_rows
        for own, n in zip(pages, lengths)
        for i in range(n)
    ]
    storage[torch.tensor(index, dtype=torch.int64, device=rows.device), 1] = rows
    return storage[:, 1], jm.Pages.of(pages, lengths, page_rows).to(rows.device)


def in_pages_of_8_bits(
    rows: torch.Tensor, lengths: list[int], stored: torch.dtype, page_rows: int = 128
) -> tuple[torch.Tensor, jm.Pages, torch.Tensor]:
    """As `in_pages`, and the rows that the storage stands for, in their dtype."""
    numbers, scales = in_8_bits(rows, stored)
    state = torch.get_rng_state()
    storage, pages = in_pages(numbers.float(), lengths, page_rows)
    torch.set_rng_state(state)  # the same places
    factors, _ = in_pages(scales, lengths, page_rows)
    whole = storage.nan_to_num(100).to(stored)  # as a storage has them before it is written
    pages = dataclasses.replace(pages, scales=factors)
    return whole, pages, from_8_bits(numbers, scales, rows.dtype)
