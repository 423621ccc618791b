"""Keys and values of cached histories in 8 bits: roundings, scores, bytes, errors. Kernels:
tests/jagged_kernels/interpreter/test_pages.py."""

import dataclasses

import pytest
import torch
from paging import in_pages_of_8_bits

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.containers.pages import DTYPES_OF_8_BITS, PagedRows, from_8_bits, in_8_bits

from .caching import Rows, Timeline, jagged, rows_of
from .hstu_cases import HEADS, WIDTH
from .test_history_in_pages import HISTORIES, PAGE, TARGETS, layers

STORED = pytest.mark.parametrize("stored", DTYPES_OF_8_BITS, ids=str)
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@STORED
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_the_rounding_of_an_element(stored, dtype):
    """Half a step of the largest element for int8; half a step of its own, or of the smallest
    numbers, for float8."""
    x = (torch.randn(500, 3, 40) * torch.logspace(-20, 20, 500)[:, None, None]).to(dtype)
    numbers, scales = in_8_bits(x, stored)
    found, x = from_8_bits(numbers, scales, torch.float64), x.double()
    largest = x.abs().amax(-1, keepdim=True)
    bound = largest / 254 if stored == torch.int8 else (x.abs() / 16).maximum(largest / 448 / 1024)
    roundings = 4 * torch.finfo(torch.float32).eps * largest
    assert ((found - x).abs() <= bound + roundings).all()
    assert numbers.dtype == stored and scales.dtype == torch.float32


@STORED
def test_rows_of_zeros_and_numbers_that_are_not_finite(stored):
    x = torch.randn(5, 2, 8)
    x[0], x[1, 0, 3], x[2, 1, 0], x[3, 0, 1] = 0, torch.nan, torch.inf, -torch.inf
    found = from_8_bits(*in_8_bits(x, stored), torch.float32)
    broken = ~x.isfinite().all(-1)
    assert broken.sum() == 3 and torch.equal(found.isnan().all(-1), broken)
    assert torch.equal(found.isfinite().all(-1), ~broken) and not found[0].any()


@STORED
@pytest.mark.parametrize("implementation", ["auto", "reference"])
@pytest.mark.parametrize("autocast", [False, True])
def test_attention_reads_the_rows_that_are_stored(offsets_of, stored, implementation, autocast):
    queries, keys = [3, 0, 70, 5], [300, 4, 0, 128]
    q, rows = torch.randn(sum(queries), 4, 8), torch.randn(sum(keys), 2, 20)
    storage, pages, rows = in_pages_of_8_bits(rows, keys, stored)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        paged, plain = (
            F.jagged_attention(
                q, *x.split([8, 12], 2), offsets_of(queries), offsets_of(keys),
                implementation=implementation, pages=own,
            )
            for x, own in ((storage, pages), (rows, None))
        )  # fmt: skip
    assert torch.equal(paged, plain) and paged.any()


@STORED
@DEVICES
@pytest.mark.parametrize("name", ["target", "self-target", "gdpa"])
def test_scores_in_pages_and_of_copied_rows(name, device, stored):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9) and stored != torch.int8:
        pytest.skip("these GPUs have no float8")
    makers = layers() | {"self-target": lambda: jm.JaggedSelfTargetAttention(WIDTH, HEADS)}
    layer = makers[name]().to(device, torch.float32).eval()
    timeline = Timeline([HISTORIES, [1, 2, 0, 3, 0]], TARGETS, torch.float32)
    caches = [jm.PagedHistoryCache(layer, 2**24, rows, stored) for rows in (PAGE, 3)]
    users, (old, new, targets) = list("abcde"), (
        jagged(timeline.take(timeline.rows, part)).to(device) for part in (0, 1, -1)
    )  # fmt: skip
    for cache in caches:
        cache.put(users, old)
        cache.append(users, new)
    paged, copied = (cache.select(users) for cache in caches)
    with torch.no_grad():
        scores = layer.score(targets, paged).values
    assert "values" not in vars(paged.layers[0]) and not isinstance(copied.layers[0], PagedRows)
    # kernels convert a number and multiply it by its factor in one operation
    bounds = dict(rtol=1e-5, atol=1e-5 * float(scores.abs().max())) if device == "cuda" else {}
    torch.testing.assert_close(scores, layer.score(targets, copied).values, **bounds)
    exact = jm.PagedHistoryCache(layer, 2**24, PAGE)
    exact.put(users, old)
    exact.append(users, new)
    kept, stored_rows = (x.select(users).layers[0].values for x in (exact, caches[0]))
    torch.testing.assert_close(stored_rows, from_8_bits(*in_8_bits(kept, stored), kept.dtype))
    assert not torch.equal(stored_rows, kept)


@DEVICES
@pytest.mark.parametrize("page_rows", [PAGE, 3])
def test_an_hstu_with_timestamps(page_rows, device):
    """Its appended events read the stored rows; the scores are near those of exact ones."""
    layer = layers()["hstu-timed"]().to(device, torch.float32).eval()
    timeline = Timeline([HISTORIES, [1, 2, 0, 3, 0]], TARGETS, torch.float32)

    def inputs(part):
        times = {name: x.to(device) for name, x in timeline.times_of(part, True).items()}
        return jagged(timeline.take(timeline.rows, part)).to(device), times

    users, scores = list("abcde"), []
    for stored in (None, torch.int8):
        cache = jm.PagedHistoryCache(layer, 2**24, page_rows, stored)
        for part, keep in enumerate((cache.put, cache.append)):
            rows, times = inputs(part)
            keep(users, rows, **times)
        kept, (targets, times) = cache.select(users), inputs(-1)
        assert torch.equal(kept.timestamps, cache.select(users).timestamps)
        with torch.no_grad():
            scores.append(layer.score(targets, kept, **times).values)
    error = (scores[1] - scores[0]).norm() / scores[0].norm()
    assert 0 < error < 0.01


def test_bytes():
    """A page has one byte for each element, and four for each row and head."""
    layer = Rows()
    caches = [jm.PagedHistoryCache(layer, 2**16, 4, x) for x in (None, torch.int8)]
    for cache in caches:
        cache.put([1], jagged([torch.randn(4, 60)]))
    assert [x.statistics().bytes for x in caches] == [4 * 60 * 4, 4 * (60 + 4)]
    assert [x._table.num_pages for x in caches] == [2**16 // 960, 2**16 // 256]
    (row,) = rows_of(caches[1].select([1]))
    assert row.dtype == torch.float32 and row.any()


def test_errors(offsets_of):
    with pytest.raises(ValueError, match="dtype must be None or int8 or float8_e4m3fn, got"):
        jm.PagedHistoryCache(Rows(), 2**16, dtype=torch.float16)
    layer = jm.JaggedTargetAttention(WIDTH, HEADS).eval()
    cache = jm.PagedHistoryCache(layer, 2**20, dtype=torch.int8)
    cache.put([1], jagged([torch.randn(4, WIDTH)]))
    layer.double()
    with pytest.raises(ValueError, match="keep the dtype of the first put, torch.float32, got"):
        cache.put([1], jagged([torch.randn(4, WIDTH, dtype=torch.float64)]))
    rows = torch.randn(5, 2, 16)
    storage, pages, _ = in_pages_of_8_bits(rows, [5], torch.int8)
    q, k, v = torch.randn(3, 2, 8), *storage.split(8, 2)
    ends = offsets_of([3]), offsets_of([5])
    for message, own, change in (
        ("k must be int8 or float8_e4m3fn with pages.scales, got torch.float32", k.float(), {}),
        ("pages.scales must be float32 with k's rows and heads", k, dict(scales=pages.scales[1:])),
        ("pages.scales must be float32", k, dict(scales=pages.scales.double())),
        ("pages.scales must be a torch.Tensor", k, dict(scales=0.1)),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            F.jagged_attention(q, own, v, *ends, pages=dataclasses.replace(pages, **change))
    with pytest.raises(ValueError, match="k must be"):
        F.jagged_attention(q, k, v, *ends, pages=dataclasses.replace(pages, scales=None))
