"""Rows of segments put into pages, for tests of attention that reads pages."""

import torch

import jagged_modules as jm


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
