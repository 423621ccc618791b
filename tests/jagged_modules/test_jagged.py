"""Jagged: every container in and out, schedules built once and shared, also out of a DataLoader
worker."""

import copy
import pickle
import re
import warnings
from typing import NamedTuple

import pytest
import torch
from marks import raising
from torch.utils.data import DataLoader

import jagged_modules as jm
from jagged_modules import schedule as schedule_module
from jagged_modules import segments
from jagged_modules.scalars import bucket_of
from jagged_modules.segments import MAX_SCHEDULES

LENGTHS = [2, 0, 3, 1]
SIZES = dict(num_heads=2, head_dim=16)


@pytest.fixture
def values():
    return torch.randn(sum(LENGTHS), 8)


@pytest.fixture
def offsets(offsets_of):
    return offsets_of(LENGTHS)


# -- containers ------------------------------------------------------------------------------------


def test_a_jagged_is_returned_as_it_is(values, offsets):
    jagged = jm.Jagged(values, offsets, max_seqlen=3)
    assert jm.Jagged.wrap(jagged) is jagged
    assert (jagged.num_segments, jagged.max_seqlen, jagged.host_lengths.tolist()) == (4, 3, LENGTHS)


def test_another_max_seqlen_of_a_jagged_is_checked(values, offsets):
    jagged = jm.Jagged(values, offsets, max_seqlen=7)
    assert jm.Jagged.wrap(jagged, max_seqlen=3).max_seqlen == 3 and jagged.max_seqlen == 7
    with pytest.raises(
        ValueError, match="offsets must have segments of at most max_seqlen = 2 rows, got 3"
    ):
        jm.Jagged.wrap(jagged, max_seqlen=2)


def test_saved_offsets_hold_nothing_else(values, offsets, tmp_path):
    assert jm.Jagged(values, offsets).host_lengths is not None
    torch.save(offsets, tmp_path / "offsets.pt")
    assert torch.equal(torch.load(tmp_path / "offsets.pt"), offsets)


def test_what_torch_does_not_count_as_written_makes_another_segmentation():
    rows, buffer = torch.randn(4, 8), torch.tensor([0, 2, 4]).numpy()
    offsets = torch.from_numpy(buffer)
    before = jm.Jagged(rows, offsets)
    key = before.segmentation_id
    assert jm.Jagged(rows, offsets).segmentation_id == key and before.host_lengths.tolist() == [
        2,
        2,
    ]
    buffer[1] = 3
    after = jm.Jagged(rows, offsets)
    assert after.segmentation_id == before.segmentation_id != key
    assert after.host_lengths.tolist() == before.host_lengths.tolist() == [3, 1]


@pytest.mark.parametrize("through", ["the tensor", "its base", "a view of it"])
def test_a_write_to_the_offsets_is_noticed(through):
    base = torch.tensor([0, 2, 4, 9])
    offsets = base[:3]
    jagged = jm.Jagged(torch.randn(4, 8), offsets)
    own = jagged.with_values(torch.randn(4, 1))
    before, key = jagged.host_lengths, jagged.segmentation_id
    jagged.prepare(num_heads=2, head_dim=8)
    {"the tensor": offsets, "its base": base, "a view of it": offsets[1:]}[through].clamp_(max=1)
    offsets[2] = 4
    assert before.tolist() == [2, 2]
    for x in (jagged, own):
        assert x.host_lengths.tolist() == [1, 3] and x.segmentation_id != key
    assert jagged.segmentation_id == own.segmentation_id and not jagged.segmentation.schedules


def test_host_offsets_are_checked_once_and_after_a_write(monkeypatch):
    checked, check = [], segments._check_offset_values
    monkeypatch.setattr(segments, "_check_offset_values", lambda *x: checked.append(check(*x)))
    values, offsets = torch.randn(4, 8), torch.tensor([0, 2, 4])
    jagged = jm.Jagged.wrap((values, offsets))
    jagged.parsed("x")
    jm.Jagged(values, offsets).parsed("x")
    assert len(checked) == 2
    offsets[1] = 5
    with pytest.raises(ValueError, match="x's offsets must not decrease, got 5 then 4"):
        jagged.parsed("x")
    offsets[1], jagged.values = 3, values[:3]
    with pytest.raises(ValueError, match="x's offsets must end at the number of rows, 3, got 4"):
        jagged.parsed("x")
    replaced = jm.Jagged(values, torch.tensor([0, 2, 4]))
    replaced.offsets = torch.tensor([0, 2, 9])
    with pytest.raises(ValueError, match="x's offsets must end at the number of rows, 4, got 9"):
        replaced.parsed("x")


def test_other_offsets_are_other_segments():
    """Those that are assigned to a container after its first use, also to an unpickled one."""
    layer, values = jm.JaggedGDPA(8, 2), torch.randn(5, 8)
    used = jm.Jagged(values, torch.tensor([0, 2, 5]))
    layer(used)
    first = used.segmentation_id
    for jagged in (used, pickle.loads(pickle.dumps(used))):
        assert jagged.segmentation_id == first
        jagged.offsets = torch.tensor([0, 4, 5])
        assert jagged.segmentation_id != first
        expected = layer(jm.Jagged(values, torch.tensor([0, 4, 5])))
        torch.testing.assert_close(layer(jagged).values, expected.values)


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
}


@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("is_copied_first", [True, False])
def test_a_copy_notices_a_write(kind, is_copied_first):
    """Before its first use: to its offsets, or to those that it was copied from."""
    counts = torch.tensor([3, 0, 2])
    jagged = jm.Jagged(torch.zeros(5), torch.tensor([0, 3, 3, 5]), host_lengths=counts)
    for given in (jagged, jm.CandidateIndex.from_counts(counts), jagged.to("meta")):
        own = COPIES[kind](given) if is_copied_first else given
        own.offsets.copy_(torch.tensor([0, 1, 1, 5]))
        own = own if is_copied_first else COPIES[kind](given)
        known = own.host_counts if isinstance(own, jm.CandidateIndex) else own.host_lengths
        assert known is None if own.offsets.is_meta else known.tolist() == [1, 0, 4]


def test_a_write_to_offsets_on_a_device_drops_the_lengths_that_were_given():
    """Meta tensors count writes as tensors on a GPU do, and the host cannot read either."""
    offsets = torch.zeros(3, dtype=torch.int64, device="meta")
    jagged = jm.Jagged(torch.empty(4, 8, device="meta"), offsets, host_lengths=torch.tensor([2, 2]))
    assert jagged.host_lengths.tolist() == [2, 2]
    offsets[1:].add_(0)
    assert jagged.host_lengths is None


def test_an_empty_jagged_tensor():
    torchrec = pytest.importorskip("torchrec")
    empty = torchrec.JaggedTensor.empty(values_dtype=torch.float32)
    jagged = jm.Jagged.wrap(empty)
    assert jagged.num_segments == 0
    assert jagged.unwrap(torch.zeros(0, 8)).values().shape == (0, 8)


class Pair(NamedTuple):
    values: torch.Tensor
    offsets: torch.Tensor


@pytest.mark.parametrize("kind", [tuple, list])
def test_pair(kind, values, offsets):
    pair = kind((values, offsets))
    jagged = jm.Jagged.wrap(pair, max_seqlen=3)
    assert jagged.values is values and jagged.offsets is offsets and jagged.max_seqlen == 3
    out = jagged.unwrap(values * 2)
    assert type(out) is kind and torch.equal(out[0], values * 2) and out[1] is offsets


def test_a_named_pair_gives_a_pair(values, offsets):
    out = jm.Jagged.wrap(Pair(values, offsets)).unwrap(values * 2)
    assert type(out) is tuple and torch.equal(out[0], values * 2) and out[1] is offsets


def test_nested(values, offsets):
    values.requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    out = jm.Jagged.wrap(nested).unwrap(jm.Jagged.wrap(nested).values * 3)
    assert out.is_nested and out.layout == torch.jagged
    total = out + nested  # possible for nested tensors of the same segments alone
    total.values().sum().backward()
    assert torch.equal(values.grad, torch.full_like(values, 4))


def test_nested_keeps_its_lengths(values, offsets):
    """to_padded_tensor pads to max_seqlen. Without one it pads to the number of all rows, or waits
    for the device."""
    nested = torch.nested.nested_tensor(list(values.split(LENGTHS)), layout=torch.jagged)
    assert jm.Jagged.wrap(nested).max_seqlen == max(LENGTHS)
    assert jm.Jagged.wrap(nested, max_seqlen=7).max_seqlen == 7
    # the first two divide by max_seqlen
    for layer in (jm.HSTULayer(8, 2), jm.HSTUStack(8, 2, 2), jm.GDPABlock(8, 2)):
        out = layer(nested)
        assert torch.equal(out.values(), layer(jm.Jagged(values, offsets, max(LENGTHS))).values)
        assert (
            out.to_padded_tensor(0.0).shape
            == (nested * 2).to_padded_tensor(0.0).shape
            == (len(LENGTHS), max(LENGTHS), 8)
        )
        assert (out._maybe_min_seqlen, out._maybe_max_seqlen) == (min(LENGTHS), max(LENGTHS))
    without = torch.nested.nested_tensor_from_jagged(values, offsets)
    assert (
        jm.Jagged.wrap(without).max_seqlen is None
        and jm.JaggedMLP([8, 4])(without)._maybe_max_seqlen is None
    )
    wrong = torch.nested.nested_tensor_from_jagged(values, offsets, max_seqlen=2)
    with pytest.raises(
        ValueError,
        match=f"^x's offsets must have segments of at most max_seqlen = 2 rows, got {max(LENGTHS)}",
    ):
        jm.GDPABlock(8, 2)(wrong)


@pytest.mark.parametrize("give", ["lengths", "offsets"])
def test_jagged_tensor(give, values, offsets):
    torchrec = pytest.importorskip("torchrec")
    weights = torch.arange(len(values))  # the row ids of an EmbeddingCollection with need_indices
    segments = dict(lengths=offsets.diff().int()) if give == "lengths" else dict(offsets=offsets)
    x = torchrec.JaggedTensor(values, weights=weights, **segments)
    out = jm.Jagged.wrap(x).unwrap(values * 2)
    assert isinstance(out, torchrec.JaggedTensor)
    assert torch.equal(out.values(), values * 2) and torch.equal(out.weights(), weights)
    assert out.lengths().tolist() == LENGTHS and out.offsets().tolist() == offsets.tolist()


@pytest.mark.parametrize("kind", ["JaggedTensor", "KeyedJaggedTensor"])
def test_weights_that_layers_would_ignore(kind, values, offsets):
    torchrec = pytest.importorskip("torchrec")
    keys = [["a", "b"]] if kind == "KeyedJaggedTensor" else []
    x = getattr(torchrec, kind)(*keys, values, weights=torch.rand(6), lengths=offsets.diff())
    message = (
        r"^x must have no floating-point weights, which would not be applied, got weights \[6\];"
        r" multiply the values by them"
    )
    with pytest.raises(ValueError, match=message):
        jm.JaggedMLP([8, 4])(x)
    with pytest.raises(ValueError, match="^targets must have no floating-point weights"):
        jm.JaggedTargetAttention(8, 2)(x, (values, offsets))


def keyed(keys, values, offsets, **options):
    return pytest.importorskip("torchrec").KeyedJaggedTensor(
        keys, values, lengths=offsets.diff().int(), **options
    )


@pytest.mark.parametrize("block", [False, True])
def test_keys_in_another_order(block, values, offsets):
    """Otherwise segments of different features would be paired."""
    layer = jm.GDPABlock(8, 2) if block else jm.JaggedTargetAttention(8, 2)
    name, other = ("x", "context") if block else ("targets", "history")
    x, same = keyed(["a", "b"], values, offsets), keyed(["a", "b"], values, offsets)
    assert torch.equal(
        layer(x, same).values(), layer(x, keyed(["c", "d"], values, offsets)).values()
    )
    for keys in (["b", "a"], ["a"]):
        message = (
            f"{other} must have as many keys as {name}, in the same order, ['a', 'b'], got {keys}"
        )
        with pytest.raises(ValueError, match=re.escape(message)):
            layer(x, keyed(keys, values, offsets))


def test_keyed_jagged_tensor(values, offsets):
    torchrec = pytest.importorskip("torchrec")
    x = torchrec.KeyedJaggedTensor(["a", "b"], values, lengths=offsets.diff().int())
    jagged = jm.Jagged.wrap(x)
    assert jagged.num_segments == 4, "each feature and sample is a segment"
    out = jagged.unwrap(values * 2)
    assert (
        isinstance(out, torchrec.KeyedJaggedTensor)
        and out.keys() == ["a", "b"]
        and out.stride() == 2
    )
    assert torch.equal(out["b"].values(), values[2:] * 2)
    x.offset_per_key()  # what the host knows by now, the result knows too
    out = jagged.unwrap(values * 2)
    assert (out.length_per_key_or_none(), out.offset_per_key_or_none()) == ([2, 4], [0, 2, 6])


def test_keyed_jagged_tensor_with_a_batch_size_per_key(values, offsets):
    torchrec = pytest.importorskip("torchrec")
    x = torchrec.KeyedJaggedTensor(
        ["a", "b"], values, lengths=offsets.diff().int(), stride_per_key_per_rank=[[3], [1]]
    )
    out = jm.Jagged.wrap(x).unwrap(values * 2)
    assert out.stride_per_key() == [3, 1] and torch.equal(out["b"].values(), values[5:] * 2)


def test_a_rebuilt_keyed_jagged_tensor_keeps_its_inverse_indices(values, offsets):
    torchrec = pytest.importorskip("torchrec")
    inverse = ["a", "b"], torch.tensor([[0, 1, 0], [1, 1, 0]])
    x = torchrec.KeyedJaggedTensor(
        ["a", "b"], values, lengths=offsets.diff().int(), inverse_indices=inverse
    )
    keys, indices = jm.Jagged.wrap(x).unwrap(values * 2).inverse_indices()
    assert keys == ["a", "b"] and torch.equal(indices, inverse[1])


def test_no_rows_and_no_segments():
    jagged = jm.Jagged(torch.zeros(0, 8), torch.zeros(1, dtype=torch.int64))
    assert jagged.num_segments == 0 and jagged.host_lengths.tolist() == []
    assert jm.Jagged.wrap((torch.zeros(0, 8), torch.zeros(3, dtype=torch.int32))).num_segments == 2


def test_copies_share_the_segmentation(values, offsets):
    jagged = jm.Jagged(values, offsets)
    segmentation_id = jagged.segmentation_id
    for own in (
        jagged.with_values(values.double()),
        jagged.to("meta"),
        pickle.loads(pickle.dumps(jagged)),
    ):
        assert own.segmentation_id == segmentation_id
        assert own.host_lengths.tolist() == LENGTHS, (
            "known on the host though the copy may be on a device"
        )
    assert jm.Jagged(values, offsets.clone()).segmentation_id != segmentation_id


def test_a_container_whose_lengths_nobody_asked_for_takes_them_along(values, offsets):
    assert jm.Jagged(values, offsets).to("meta").host_lengths.tolist() == LENGTHS


@pytest.mark.parametrize("kind", ["container", "index", "plan"])
def test_a_dtype_is_no_device(values, offsets, kind):
    """It would round the offsets."""
    given = {
        "container": jm.Jagged(values, offsets),
        "index": jm.CandidateIndex.from_offsets(offsets),
        "plan": jm.functional.ScorePlan.from_offsets(offsets),
    }[kind]
    with pytest.raises(TypeError, match="device must be a torch.device, .* got dtype"):
        given.to(torch.bfloat16)


# -- schedules -------------------------------------------------------------------------------------


class ThreeLayers(torch.nn.Module):
    """On the meta device, everything runs except the kernels' arithmetic, including the
    schedules."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(
            jm.JaggedTargetAttention(8, 2, device="meta") for _ in range(3)
        )

    def forward(self, targets, history, candidates=None):
        for layer in self.layers:
            targets = layer(targets, history, *([] if candidates is None else [candidates]))
        return targets


def step(targets, history, candidates=None):
    out = ThreeLayers()(targets, history, candidates)
    (
        out if isinstance(out, torch.Tensor) and not out.is_nested else jm.Jagged.wrap(out).values
    ).sum().backward()


def test_jagged_layers_share_one_schedule(builds, values, offsets, offsets_of):
    history = jm.Jagged(values, offsets).to("meta")
    targets = jm.Jagged(torch.randn(6, 8), offsets_of([1, 2, 0, 3])).to("meta")
    step(targets, history)
    assert builds == ["device_schedule"]
    step(targets, history.with_values(history.values))
    step(targets.with_values(targets.values), history)
    assert len(builds) == 1
    step(history, history)
    assert len(builds) == 2


def test_the_device_makes_the_schedule_of_a_forward_alone(builds, values, offsets):
    """Without gradients, unless it was prepared. A backward that meets it later makes its own
    list."""
    history = jm.Jagged(values, offsets).to("meta")
    index = jm.CandidateIndex.from_counts(torch.tensor([1, 0, 2, 1])).to("meta")
    with torch.no_grad():
        layer = jm.JaggedTargetAttention(8, 2, device="meta")
        targets = torch.empty(4, 1, 8, device="meta")
        for queries in (index, None):
            layer(targets if queries else history, history, *([queries] if queries else []))
        assert builds == ["device_schedule"] * 2 and all(
            x.backward is None for x in builds.schedules
        )
    step(history, history)
    assert len(builds) == 2, "it has the forward's"
    with torch.no_grad():
        prepared = jm.Jagged(values, offsets.clone()).prepare(num_heads=2, head_dim=4).to("meta")
        layer(prepared, prepared)
    assert builds[2:] == ["host_schedule"] and builds.schedules[-1].backward is not None


@pytest.mark.parametrize("kind", ["pair", "JaggedTensor", "KeyedJaggedTensor"])
def test_layers_share_one_schedule_of_other_containers(kind, builds, values, offsets):
    torchrec = pytest.importorskip("torchrec")
    values, offsets = values.to("meta"), offsets.to("meta")
    wrap = {
        "pair": lambda: (values, offsets),
        "JaggedTensor": lambda: torchrec.JaggedTensor(values, lengths=offsets.diff()),
        "KeyedJaggedTensor": lambda: torchrec.KeyedJaggedTensor(
            ["a"], values, lengths=offsets.diff(), stride=4
        ),
    }[kind]
    x = wrap()
    step(x, x)
    assert builds == ["device_schedule"]
    step(torch.empty(4, 3, 8, device="meta"), x)
    assert len(builds) == 2


def test_nested_tensors_share_the_schedules_of_their_offsets(values, offsets):
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    jagged = jm.Jagged.wrap(nested).prepare(**SIZES)
    assert jm.Jagged.wrap(jagged.unwrap(values * 2)).segmentation_id == jagged.segmentation_id
    assert jm.Jagged.wrap(nested + 1).segmentation_id == jagged.segmentation_id


def test_candidates_share_one_schedule(builds, values, offsets):
    history = jm.Jagged(values, offsets).to("meta")
    index = jm.CandidateIndex.from_map(torch.tensor([3, 0, 0, 2]), 4)
    targets = torch.empty(4, 1, 8, device="meta")
    step(targets, history, index)
    step(targets, history, index.to("meta"))
    assert builds == ["device_schedule"]
    step(targets, history, jm.CandidateIndex.from_map(torch.tensor([3, 0, 0, 2]), 4))
    assert len(builds) == 2


def test_each_number_of_rows_per_candidate_has_its_schedule(builds, values, offsets):
    history = jm.Jagged(values, offsets)
    index = jm.CandidateIndex.from_counts(torch.tensor([1, 0, 2, 1]))
    for rows in (1, 2, 1):
        history.prepare(**SIZES, queries=index, rows_per_candidate=rows)
    assert builds == ["host_schedule"] * 2


def test_offsets_that_were_written_to_get_a_new_schedule(builds, values, offsets_of):
    offsets = offsets_of(LENGTHS)
    jm.Jagged(values, offsets).prepare(**SIZES)
    offsets.copy_(offsets_of([6, 0, 0, 0]))
    jm.Jagged(values, offsets).prepare(**SIZES)
    before, after = builds.schedules
    assert before.tiles[:, 0].unique().tolist() == [0, 2, 3] and after.tiles[
        :, 0
    ].unique().tolist() == [0]


def test_the_schedule_is_that_of_the_lengths(builds, values, offsets, offsets_of):
    history = jm.Jagged(values, offsets)
    sizes = dict(num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    for queries, q_lengths in (
        (None, LENGTHS),
        (5, [5] * 4),
        (jm.Jagged(torch.randn(9, 8), offsets_of([0, 4, 4, 1])), [0, 4, 4, 1]),
        (jm.CandidateIndex.from_counts(torch.tensor([1, 0, 2, 1])), [3, 0, 6, 3]),
    ):
        history.prepare(**sizes, queries=queries, rows_per_candidate=3)
        actual = builds.schedules[-1]
        expected = schedule_module.host_schedule(
            torch.tensor(q_lengths), torch.tensor(LENGTHS), **sizes
        )
        for schedule, other in ((actual, expected), (actual.backward, expected.backward)):
            assert torch.equal(schedule.tiles, other.tiles) and torch.equal(
                schedule.num_tiles, other.num_tiles
            )


def test_a_long_lived_history_keeps_few_schedules(builds, values, offsets):
    """It keeps those built last. Others are built again."""
    history = jm.Jagged(values, offsets)
    queries = [jm.CandidateIndex.from_counts(torch.tensor([1, 0, 2, 1])) for _ in range(100)]
    for index in queries:
        history.prepare(**SIZES, queries=index)
    builds.clear()
    for index in queries[-MAX_SCHEDULES:]:
        history.prepare(**SIZES, queries=index)
    assert not builds
    for index in reversed(queries):
        history.prepare(**SIZES, queries=index)
    assert len(queries) - len(builds) == MAX_SCHEDULES


def test_a_prepared_schedule_of_other_sizes_is_noticed(builds, values, offsets):
    history = (
        jm.Jagged(values, offsets)
        .to("meta")
        .prepare(num_heads=2, head_dim=4)
        .prepare(num_heads=2, head_dim=4, queries=3)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(history, history)
        step(torch.empty(4, 3, 8, device="meta"), history)
        # nothing was prepared
        step(torch.empty(4, 3, 8, device="meta"), jm.Jagged(values, offsets.clone()).to("meta"))
    builds.clear()
    sizes = (
        "num_heads=2, num_kv_heads=2, head_dim={}, itemsize=4, batch_invariant=False,"
        " queries=Jagged, mask=None"
    )
    needed = rf"it needs \({sizes.format(8)}\)"
    prepared = rf"prepared are \({sizes.format(4)}; .*queries=3, mask=None\)"
    with pytest.warns(
        UserWarning, match=f"no schedule that Jagged.prepare built fits.*{needed}, {prepared}"
    ):
        history.schedule(num_heads=2, head_dim=8, dtype=torch.float32)
    with pytest.warns(
        UserWarning, match="queries=Jagged, mask=None\\) of other queries, prepared are"
    ):
        history.schedule(
            num_heads=2, head_dim=4, dtype=torch.float32, queries=jm.Jagged(values, offsets.clone())
        )
    with pytest.warns(UserWarning, match=r"mask=AttentionMask\(causal=True\)\), prepared are"):
        history.schedule(
            num_heads=2, head_dim=4, dtype=torch.float32, mask=jm.AttentionMask(causal=True)
        )
    assert builds == ["device_schedule"] * 3


class Batches(torch.utils.data.Dataset):
    """Batches that a DataLoader worker prepares: a history, its candidates, their targets."""

    def __len__(self):
        return 2

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        offsets = torch.cat(
            [
                torch.zeros(1, dtype=torch.int64),
                torch.randint(0, 9, (5,), generator=generator).cumsum(0),
            ]
        )
        history = jm.Jagged(torch.randn(int(offsets[-1]), 8), offsets)
        candidates = jm.CandidateIndex.from_map(torch.randint(0, 5, (7,), generator=generator), 5)
        history.prepare(num_heads=2, head_dim=4, queries=candidates)
        history.prepare(num_heads=2, head_dim=4)
        return history, candidates


def test_schedules_prepared_in_a_data_loader_are_used(builds):
    for history, candidates in DataLoader(Batches(), batch_size=None, num_workers=1):
        history, candidates = history.to("meta"), candidates.to("meta")
        step(torch.empty(7, 1, 8, device="meta"), history, candidates)
        step(history, history)
        step(history.with_values(history.values * 2), history)
    assert builds == [], "the worker built them"


# -- bad input -------------------------------------------------------------------------------------


def test_lengths_that_contradict_the_offsets_are_an_error():
    torchrec = pytest.importorskip("torchrec")
    lengths, offsets = torch.tensor([2, 0, 4]), torch.tensor([0, 2, 3, 6])
    x = torchrec.JaggedTensor(torch.randn(6, 8), lengths=lengths, offsets=offsets)
    message = (
        r"history's lengths must be the differences of its offsets, \[2, 1, 3\], got \[2, 0, 4\]"
    )
    with pytest.raises(ValueError, match=message):
        jm.Jagged.wrap(x, name="history")
    with pytest.raises(ValueError, match=message):
        jm.Jagged.wrap(
            torchrec.KeyedJaggedTensor(["a"], x.values(), lengths=lengths.int(), offsets=offsets),
            name="history",
        )


def bad_calls():
    values, offsets = torch.randn(6, 8), torch.tensor([0, 2, 2, 5, 6])
    nested = torch.nested.nested_tensor_from_jagged(values, offsets)
    holes = torch.nested.nested_tensor_from_jagged(
        values, offsets, lengths=torch.tensor([1, 0, 3, 1])
    )
    strided = torch.nested.nested_tensor(
        [torch.randn(2, 8), torch.randn(3, 8)], layout=torch.strided
    )
    jagged = jm.Jagged(values, offsets)
    on_device = jm.Jagged(values.to("meta"), offsets.to("meta"))
    one_user = jm.CandidateIndex.from_counts(torch.tensor([3]))
    too_many = jm.AttentionMask(num_targets=torch.tensor([9, 0, 0, 0]))
    return [
        *raising(
            TypeError,
            {
                "values must be a torch.Tensor, got list": lambda: jm.Jagged([1.0], offsets),
                "offsets must be a torch.Tensor, got list": lambda: jm.Jagged(values, [0, 6]),
                "offsets must be int32 or int64, got torch.float32": lambda: jm.Jagged(
                    values, offsets.float()
                ),
                "max_seqlen must be an int, got float": lambda: jm.Jagged(
                    values, offsets, max_seqlen=2.5
                ),
                "^x's offsets must be a torch.Tensor, got int": lambda: jm.Jagged.wrap((values, 3)),
                "mask must be an AttentionMask, got str": lambda: jagged.prepare(
                    num_heads=1, head_dim=8, mask="causal"
                ),
                "queries must be a Jagged, .*got list": lambda: jagged.prepare(
                    num_heads=1, head_dim=8, queries=[1]
                ),
                "dtype must be a torch.dtype, got int": lambda: jagged.prepare(
                    num_heads=1, head_dim=8, dtype=0
                ),
                "host_lengths must be a tensor or a sequence .*got str": lambda: jm.Jagged(
                    values, offsets, host_lengths="2013"
                ),
                "host_lengths must be a tensor or a sequence .*got dict": lambda: jm.Jagged(
                    values, offsets, host_lengths={}
                ),
                "host_lengths must be int32 or int64": lambda: jm.Jagged(
                    values, offsets, host_lengths=[2.0, 0, 3, 1]
                ),
                "x must be a JaggedTensor.*got Tensor": lambda: jm.Jagged.wrap(values),
                "x must be a JaggedTensor.*got tuple of Tensor, Tensor, int$": lambda: (
                    jm.Jagged.wrap((values, offsets, 3))
                ),
                "x must be a JaggedTensor.*got list of ndarray, Tensor$": lambda: jm.Jagged.wrap(
                    [values.numpy(), offsets]
                ),
                "x must be a JaggedTensor.*got NoneType": lambda: jm.Jagged.wrap(None),
                "num_kv_heads must be an int, got float": lambda: jagged.prepare(
                    **SIZES, num_kv_heads=1.0
                ),
                "dtype must be a torch.dtype, got str": lambda: jagged.prepare(
                    **SIZES, dtype="bf16"
                ),
                "queries must be a Jagged, a CandidateIndex, an int or None, got str": lambda: (
                    jagged.prepare(**SIZES, queries="all")
                ),
            },
        ),
        *raising(
            ValueError,
            {
                r"values must have shape \[L, ...\], got \[\]": lambda: jm.Jagged(
                    torch.tensor(1.0), offsets
                ),
                r"offsets must have shape \[B \+ 1\], got \[0\]": lambda: jm.Jagged(
                    values, offsets[:0]
                ),
                r"offsets must be 1-D, got shape \[1, 5\]": lambda: jm.Jagged(
                    values, offsets[None]
                ),
                "offsets must start at 0, got 1: they are a 0 and the sums of lengths": lambda: (
                    jm.Jagged(values, offsets + 1)
                ),
                "offsets must not decrease, got 4 then 3 at segment 1": lambda: jm.Jagged(
                    values, torch.tensor([0, 4, 3, 6])
                ),
                "offsets must end at the number of rows, 5, got 6": lambda: jm.Jagged(
                    values[:5], offsets
                ),
                "^offsets must have segments of at most max_seqlen = 2 rows, got 3": lambda: (
                    jm.Jagged(values, offsets, max_seqlen=2)
                ),
                "^offsets must be on the values' device, cpu, or the host, got meta": lambda: (
                    jm.Jagged(values, offsets.to("meta"))
                ),
                "^history's offsets must start at 0, got 1": lambda: jm.Jagged.wrap(
                    (values, offsets + 1), name="history"
                ),
                "^x's offsets must have segments of at most max_seqlen = 2 rows, got 3": lambda: (
                    jm.Jagged.wrap(jagged, 2, name="x")
                ),
                "values must be a dense tensor, got torch.sparse_coo": lambda: jm.Jagged(
                    values.to_sparse(), offsets
                ),
                "x's values must be a dense tensor, got torch.sparse_coo": lambda: jm.Jagged.wrap(
                    (values.to_sparse(), offsets)
                ),
                "offsets must be a dense tensor, got torch.sparse_coo": lambda: jm.Jagged(
                    values, offsets.to_sparse()
                ),
                r"host_lengths must be \[B\] = \[4\].*got \[3\]": lambda: jm.Jagged(
                    values, offsets, host_lengths=[2, 0, 4]
                ),
                "host_lengths must add up to .* 6, got 7": lambda: jm.Jagged(
                    values, offsets, host_lengths=[2, 0, 3, 2]
                ),
                "host_lengths must not be negative, got -1": lambda: jm.Jagged(
                    values, offsets, host_lengths=[7, -1, 0, 0]
                ),
                "host_lengths must be the differences of offsets": lambda: jm.Jagged(
                    values, offsets, host_lengths=[2, 1, 2, 1]
                ),
                "x must have layout torch.jagged": lambda: jm.Jagged.wrap(strided),
                "x must have .*no holes": lambda: jm.Jagged.wrap(holes),
                "x must have .*second dimension ragged": lambda: jm.Jagged.wrap(
                    nested.transpose(1, 2)
                ),
                "values must keep the number of rows, 6, got 3": lambda: jagged.unwrap(values[:3]),
                "lengths are on a device only; pass host_lengths": lambda: on_device.prepare(
                    **SIZES
                ),
                "num_heads must be at least 1, got 0": lambda: jagged.prepare(
                    num_heads=0, head_dim=8
                ),
                "head_dim must be at least 1, got 0": lambda: jagged.prepare(
                    num_heads=2, head_dim=0
                ),
                "queries must be at least 0, got -1": lambda: jagged.prepare(**SIZES, queries=-1),
                "queries must have .*, 4, or a multiple, got 1": lambda: jagged.prepare(
                    **SIZES, queries=one_user
                ),
                "num_heads must be a multiple of .*, got 3": lambda: jagged.prepare(
                    num_heads=3, num_kv_heads=2, head_dim=8
                ),
                "head_dim must be at most 256, got 257": lambda: jagged.prepare(
                    num_heads=2, head_dim=257
                ),
                "dtype must be float64, .* or bfloat16, got torch.int8": lambda: jagged.prepare(
                    **SIZES, dtype=torch.int8
                ),
                "mask.num_targets must be at most the segment's length, got 9 of 2": lambda: (
                    jagged.prepare(**SIZES, mask=too_many)
                ),
                "rows_per_candidate must be at least 1, got -1": lambda: jagged.prepare(
                    **SIZES, rows_per_candidate=-1
                ),
            },
        ),
        (
            lambda: jagged.with_values(values[:3]),
            ValueError,
            "values must keep the number of rows, 6, got 3",
        ),
    ]


@pytest.mark.parametrize(
    "case", range(len(bad_calls())), ids=[message[:40] for _, _, message in bad_calls()]
)
def test_bad_input(case):
    call, error, message = bad_calls()[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("rows, rounded", [(0, 8), (1, 8), (8, 8), (101, 104), (3001, 3072)])
def test_numbers_of_rows_that_repeat(rows, rounded):
    found, unit = bucket_of(rows, 16, 8)
    assert found == rounded and found % unit == 0 and found - rows <= max(8, rows / 16 + 1)
    jagged = jm.Jagged(torch.randn(rows, 4), torch.tensor([0, rows]))
    assert jagged.rounded() is jagged
    with pytest.raises(ValueError, match="steps_per_octave must be"):
        jagged.rounded(0)


@pytest.mark.gpu
def test_rounded_rows_give_the_same_results():
    layer = jm.HSTULayer(32, 2, jm.HSTUConfig(scaling_seqlen=60)).cuda()
    x = torch.randn(101, 32, device="cuda", requires_grad=True)
    jagged = jm.Jagged(x, torch.tensor([0, 60, 60, 101], device="cuda"), 60)
    rounded = jagged.rounded()
    assert rounded.num_rows == 104 and rounded.max_seqlen == 60
    results = []
    for history in (jagged, rounded):
        out = layer(history).values
        results.append(
            [out[:101], *torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])]
        )
    assert not out[101:].any()
    for found, expected in zip(*results):
        torch.testing.assert_close(found, expected)
