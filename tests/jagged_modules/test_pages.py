"""Attention to keys in pages on the CPU: the results of gathered keys, and errors. Kernels:
tests/jagged_kernels."""

import dataclasses

import pytest
import torch
from paging import in_pages

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.containers.pages import rows_of_events, tables_of

QUERIES, KEYS = [3, 0, 70, 5, 9], [300, 4, 0, 128, 257]


@pytest.fixture
def call(offsets_of):
    """Arguments of jagged_attention with keys in pages, and with the same keys side by side."""
    q, rows = torch.randn(sum(QUERIES), 4, 8), torch.randn(sum(KEYS), 2, 20)
    storage, pages = in_pages(rows, KEYS)
    segments = offsets_of(QUERIES), offsets_of(KEYS)
    paged = dict(
        zip(
            ("q", "k", "v", "q_offsets", "kv_offsets"),
            (q, *storage.split([8, 12], dim=2), *segments),
        ),
        pages=pages,
    )
    k, v = rows.split([8, 12], dim=2)
    return paged, {**paged, "k": k, "v": v, "pages": None}


@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize(
    "activation, masked, biased", [("softmax", True, True), ("silu", False, False)]
)
def test_results_of_gathered_keys(call, implementation, activation, masked, biased):
    mask = (
        jm.AttentionMask(causal=True, num_targets=torch.tensor([1, 0, 0, 5, 3])) if masked else None
    )
    times = torch.arange(sum(KEYS))
    bias = (
        jm.RelativeBias(torch.randn(4, 999), torch.randn(4, 3), times, torch.tensor([3, 50]))
        if biased
        else None
    )
    options = dict(
        activation=activation,
        mask=mask,
        bias=bias,
        implementation=implementation,
        max_seqlen_kv=300,
    )
    paged, plain = (F.jagged_attention(**x, **options) for x in call)
    assert torch.equal(paged, plain)


def test_target_attention_and_autocast(call):
    counts = jm.CandidateIndex.from_counts(torch.tensor(QUERIES))
    options = [
        {name: x for name, x in arguments.items() if name not in ("q", "q_offsets")}
        for arguments in call
    ]
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            paged, plain = (
                F.target_attention(call[0]["q"][:, None], candidates=counts, **x) for x in options
            )
        assert paged.dtype == dtype and torch.equal(paged, plain)


def test_a_table_by_its_definition():
    lengths, numbers = [200, 0, 128, 130], [[5, 3], [], [7], [1, 2]]
    pages = jm.Pages.of(numbers, lengths, 128)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    assert pages.num_rows == 458 and pages.table.shape == (458 // 128 + 4,)
    for b, own in enumerate(numbers):
        first = int(starts[b]) // 128 + b
        assert pages.table[first : first + len(own)].tolist() == own
    with pytest.raises(
        ValueError, match="^pages must have 2 pages for the 200 keys of segment 0, got 1$"
    ):
        jm.Pages.of([[5]], [200], 128)
    with pytest.raises(ValueError, match="^lengths must be one per segment of pages, 2, got 1$"):
        jm.Pages.of([[5], [6]], [100], 128)


def user_table(numbers, lengths):
    """`UserTable.users`, of slots that nothing here reads: behind a user's pages are others."""
    width = 1 + max(map(len, numbers))
    rows = [[n, 77, *x, *[99] * (width - len(x))] for n, x in zip(lengths, numbers)]
    return torch.tensor(rows).int()


@pytest.mark.parametrize("num_rows", [None, 600])
def test_tables_of_users(num_rows):
    """Those of `Pages.of`; a graph's have entries for more rows than the users."""
    lengths, numbers = [200, 0, 128, 130, 0], [[5, 3], [], [7], [1, 2], []]
    expected = jm.Pages.of(numbers, lengths, 128)
    offsets, table = tables_of(user_table(numbers, lengths), 128, num_rows or sum(lengths))
    assert offsets.tolist() == torch.tensor([0, *lengths]).cumsum(0).tolist()
    assert table.shape == ((num_rows or 458) // 128 + 5,) and table.dtype == torch.int32
    for b, own in enumerate(numbers):
        first = int(offsets[b]) // 128 + b
        assert table[first : first + len(own)].tolist() == own
        assert expected.table[first : first + len(own)].tolist() == own


def test_rows_of_new_events():
    """The last rows of each user, across pages; those of padding, users without rows, are spare."""
    lengths, numbers = [200, 0, 128, 130, 3], [[5, 3], [], [7], [1, 2], [4]]
    new, offsets = [2, 0, 1, 4, 3], [0, 2, 2, 3, 7, 10]
    users = torch.cat([user_table(numbers, lengths), torch.zeros(2, 5).int()])
    rows = rows_of_events(users, torch.tensor([*offsets, 150, 151]), 151, 128, -7)
    expected = [
        page * 128 + row % 128
        for length, count, own in zip(lengths, new, numbers)
        for row in range(length - count, length)
        for page in [own[row // 128]]
    ]
    assert rows.dtype == torch.int64 and rows.tolist() == expected + [-7] * 141


def test_bad_pages(call, offsets_of):
    arguments, _ = call
    pages, k = arguments["pages"], arguments["k"]

    def changed(**fields):
        return dict(pages=dataclasses.replace(pages, **fields))

    table = pages.table
    for change, error, message in (
        (dict(pages=table), TypeError, "^pages must be a Pages, got Tensor"),
        (changed(page_rows=64), ValueError, "^pages.page_rows must be at least 128, got 64"),
        (changed(page_rows=192), ValueError, "^pages.page_rows must be a power of 2, got 192"),
        (
            changed(num_rows=700),
            ValueError,
            "^kv_offsets must end at the number of rows, 700, got 689",
        ),
        (
            changed(table=table.long()),
            ValueError,
            (
                r"^pages.table must be int32 \[num_rows // page_rows \+ B\] = \[10\], got"
                r" torch.int64 \[10\]"
            ),
        ),
        (changed(table=table[1:]), ValueError, r"= \[10\], got torch.int32 \[9\]"),
        (changed(table=table - 100), ValueError, "^pages.table must have pages 0 to 9, got -"),
        (changed(table=table + 10), ValueError, "^pages.table must have pages 0 to 9, got "),
        (
            dict(k=k[:-1]),
            ValueError,
            "^k must have a multiple of pages.page_rows, 128, rows, got 1279",
        ),
        (
            dict(k=k.mT.contiguous().mT),
            ValueError,
            "^k's last dimension must be contiguous with pages, got strides",
        ),
        (
            dict(q_offsets="shared"),
            ValueError,
            "^pages must be None where segments share queries or keys",
        ),
        (
            dict(kv_offsets="shared"),
            ValueError,
            "^pages must be None where segments share queries or keys",
        ),
        (
            dict(q_offsets=offsets_of([*QUERIES[:4], 4, 1, 1, 1, 1, 1])),
            ValueError,
            "^pages must be None with several query groups, got 10 and 5",
        ),
        (
            dict(q=arguments["q"].clone().requires_grad_()),
            RuntimeError,
            "^attention with pages has no gradient: call it under torch.no_grad",
        ),
        (
            dict(bias=jm.RelativeBias(torch.zeros(999, requires_grad=True))),
            RuntimeError,
            "^attention with pages has no gradient",
        ),
    ):
        with pytest.raises(error, match=message):
            F.jagged_attention(**arguments | change)


def test_a_call_without_gradients_takes_parameters(call):
    paged, plain = call
    q = paged["q"].clone().requires_grad_()
    with torch.no_grad():
        assert torch.equal(
            F.jagged_attention(**paged | dict(q=q)), F.jagged_attention(**plain | dict(q=q))
        )
