"""torch.compile and torch.export of scores whose histories lie in pages."""

import io

import pytest
import torch
from marks import SLOW, slow_after
from paging import in_pages, in_pages_of_8_bits
from torch.fx.experimental import _config
from torch.utils._pytree import (
    tree_flatten,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

import jagged_modules as jm
from jagged_modules import functional as F

from .graph_cases import HEADS, WIDTH, compiled

PAGE = 128
LENGTHS = dict(zip("abcdefg", (300, 0, 128, 257, 5, 1, 260)))
# users and their targets; no two sizes of the first are equal
BATCHES = [("abcdea", [2, 9, 3, 7, 4, 9]), ("cadg", [3, 1, 7, 8]), ("ag", [3, 1])]
FEW_ROWS = [("a", [7]), ("b", [3]), ("f", [2]), ("bb", [1, 2])]
HSTU = jm.HSTUConfig(scaling_seqlen=400, head_dim=3, linear_dim=5)
TIMED = jm.HSTUConfig(scaling_seqlen=400, relative_position=400, relative_time=6)
LAYERS = {
    "target": lambda: jm.JaggedTargetAttention(WIDTH, HEADS),
    "self-target": lambda: jm.JaggedSelfTargetAttention(WIDTH, HEADS),
    "gdpa": lambda: jm.JaggedGDPA(WIDTH, HEADS, "softmax", jm.AttentionMask(causal=True)),
    "hstu": lambda: jm.HSTUStack(WIDTH, HEADS, 2, HSTU),
    "hstu-timed": lambda: jm.HSTUStack(WIDTH, HEADS, 2, TIMED),
}
STORED = [
    pytest.param(name, dtype, marks=[SLOW] * (dtype is not None and name != "target"))
    for name in LAYERS
    for dtype in (None, torch.int8)
]


def history(lengths) -> jm.Jagged:
    counts = jm.CandidateIndex.from_counts(torch.tensor(list(lengths)))
    return jm.Jagged(torch.randn(sum(lengths), WIDTH), counts.offsets)


class Score(torch.nn.Module):
    """A layer's score as a model, and its inputs for users of a cache."""

    def __init__(self, name: str, dtype: torch.dtype | None):
        super().__init__()
        self.layer, self.timed = LAYERS[name]().eval(), name == "hstu-timed"
        self.cache = jm.PagedHistoryCache(self.layer, 2**23, PAGE, dtype=dtype)
        self.cache.put(list(LENGTHS), history(LENGTHS.values()), **self.times(LENGTHS.values()))

    def times(self, lengths) -> dict:
        return dict(timestamps=torch.randint(999, (sum(lengths),))) if self.timed else {}

    def inputs(self, users: str, lengths: list[int]) -> tuple:
        times = self.times(lengths)
        return history(lengths), self.cache.select(list(users)), *times.values()

    def forward(self, targets, kv, timestamps=None):
        options = {} if timestamps is None else dict(timestamps=timestamps)
        with torch.no_grad():
            return self.layer.score(targets, kv, **options).values


@pytest.mark.parametrize("name, dtype", STORED)
def test_one_graph_scores_all_batches(name, dtype):
    model = Score(name, dtype)
    graph, counter = compiled(lambda *inputs: model(*inputs))
    for users, lengths in BATCHES:
        inputs = model.inputs(users, lengths)
        torch.testing.assert_close(graph(*inputs), model(*inputs))
        assert all("values" not in vars(x) for x in inputs[1].layers)
    assert counter.frame_count == 1


@slow_after(1, "strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("name, dtype", STORED)
def test_an_exported_score_serves_all_batches(name, dtype, strict):
    """Saved and loaded. The saved example has the pages that it reads, not the whole storage."""
    model, dynamic = Score(name, dtype), torch.export.Dim.DYNAMIC
    inputs = model.inputs(*BATCHES[0])
    pages = [{0: dynamic}, dynamic, *([{}] if dtype else [])]
    rows = {0: dynamic}
    kv = [([{}, rows, pages],) * len(inputs[1].layers), *([rows] if model.timed else [])]
    shapes = [rows, rows], kv, *([rows] if model.timed else [])
    file = io.BytesIO()
    with _config.patch(backed_size_oblivious=True):  # also for one user and for 0 or 1 rows
        torch.export.save(
            torch.export.export(model, inputs, dynamic_shapes=shapes, strict=strict), file
        )
    assert file.tell() < model.cache.max_bytes / 2
    file.seek(0)
    exported = torch.export.load(file).module()
    for users, lengths in BATCHES + FEW_ROWS:
        inputs = model.inputs(users, lengths)
        torch.testing.assert_close(exported(*inputs), model(*inputs))


def test_a_drafted_score_of_pages():
    """At the sizes of the example, which torch's report names."""
    model, dynamic = Score("target", None), torch.export.Dim.DYNAMIC
    inputs, rows = model.inputs(*BATCHES[0]), {0: dynamic}
    shapes = [rows, rows], [([{}, rows, [rows, dynamic]],)]
    program = torch.export.draft_export(model, inputs, dynamic_shapes=shapes)
    torch.testing.assert_close(program.module()(*inputs), model(*inputs))


class OfTensors(torch.nn.Module):
    """Attention to keys and values in pages, whose table is an input."""

    def forward(self, q, users, storage, offsets, table, num_rows, scales=None):
        k, v = storage.chunk(2, dim=2)
        pages = jm.Pages(table, PAGE, num_rows, scales)
        return F.target_attention(q, k, v, users, offsets, pages=pages)


@slow_after(1, "strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_exported_attention_takes_a_page_table(stored, strict):
    """The storage may grow too."""

    def inputs(users, count):
        lengths = [LENGTHS[user] for user in users]
        rows = torch.randn(sum(lengths), HEADS, 16)
        if stored:
            storage, pages, _ = in_pages_of_8_bits(rows, lengths, stored)
        else:
            storage, pages = in_pages(rows, lengths)
        offsets = history(lengths).offsets
        q, candidates = torch.randn(count, 1, HEADS, 8), torch.randint(len(users), (count,))
        scales = [pages.scales] if stored else []
        return q, candidates, storage, offsets, pages.table, pages.num_rows, *scales

    rows, model = {0: torch.export.Dim.DYNAMIC}, OfTensors()
    given = inputs("abcde", 11)
    shapes = *[rows] * 5, torch.export.Dim.DYNAMIC, *[rows] * len(given[6:])
    exported = torch.export.export(model, given, dynamic_shapes=shapes, strict=strict).module()
    for users, count in (("abcde", 11), ("cg", 3), ("a", 1), ("abcdeffg" * 9, 50)):
        given = inputs(users, count)
        torch.testing.assert_close(exported(*given), model(*given))


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_a_pytree_keeps_every_part(dtype):
    (layer,) = Score("target", dtype).cache.select(["g", "a"]).layers
    leaves, structure = tree_flatten(layer)
    structure = treespec_loads(treespec_dumps(structure))
    copy = tree_unflatten(leaves, structure)
    for name in ("storage", "offsets", "dtype"):
        assert getattr(copy, name) is getattr(layer, name)
    for name in ("table", "num_rows", "page_rows", "scales"):
        assert getattr(copy.pages, name) is getattr(layer.pages, name)
    assert copy.dtype is torch.float32 and copy.host_lengths.tolist() == [260, 300]


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_a_saved_selection_has_pages_of_its_own(dtype):
    model = Score("target", dtype)
    targets, kv = model.inputs("gca", [3, 2, 4])
    file = io.BytesIO()
    torch.save(kv, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    (layer,) = loaded.layers
    assert layer.pages.table.tolist() == [*range(8)]  # 3, 1, 3, and a spare one
    assert len(layer.storage) == 8 * PAGE
    assert layer.host_lengths.tolist() == [260, 128, 300]
    assert torch.equal(model(targets, loaded), model(targets, kv))


@pytest.mark.parametrize("change", [lambda x: x, torch.Tensor.detach], ids=["same", "detached"])
def test_pages_are_read_as_long_as_a_map_of_the_selection_exists(change):
    model = Score("target", None)
    targets, kv = model.inputs("ga", [3, 4])
    expected = model(targets, kv)
    kv = tree_map(lambda x: change(x) if isinstance(x, torch.Tensor) else x, kv)
    model.cache.clear()
    for user in range(20):  # of all pages that are free
        model.cache.put([user], history([300]))
    assert torch.equal(model(targets, kv), expected)
