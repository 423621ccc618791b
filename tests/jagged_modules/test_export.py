"""Containers as pytrees: inputs and outputs of exported and compiled models, of any number of users
and candidates, saved and loaded."""

import dataclasses
import io

import pytest
import torch
import torch.fx.experimental._config
from marks import slow_after
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

import jagged_modules as jm
from jagged_modules import functional as F
from jagged_modules.schedule import host_schedule

HEADS, WIDTH = 2, 32
# users, history rows, candidates; the first are those of the export
SIZES = [(5, 41, 11), (7, 59, 37), (1, 7, 3), (1, 1, 1), (1, 0, 1), (2, 0, 4), (3, 4, 0), (0, 0, 0)]
USERS, ROWS, CANDIDATES = (torch.export.Dim(name) for name in ("users", "rows", "candidates"))
# dynamic shapes, in the order of the pytrees' children
JAGGED, INDEX = [{0: ROWS}, {0: USERS + 1}], [{0: USERS + 1}]


def random_offsets(users: int, rows: int) -> torch.Tensor:
    if not users:
        return torch.zeros(1, dtype=torch.int64)
    return torch.cat(
        [
            torch.tensor([0]),
            torch.randint(rows + 1, (users - 1,)).sort().values,
            torch.tensor([rows]),
        ]
    )


def history(users: int, rows: int) -> jm.Jagged:
    return jm.Jagged(torch.randn(rows, WIDTH), random_offsets(users, rows))


def index(users: int, count: int) -> jm.CandidateIndex:
    return jm.CandidateIndex.from_offsets(random_offsets(users, count))


def random_targets(jagged: jm.Jagged) -> torch.Tensor:
    return (torch.rand(jagged.num_segments) * (jagged.host_lengths + 1)).long()


def assert_same(actual, expected) -> None:
    """The same structure with the same values."""
    (actual, structure), (expected, expected_structure) = (
        tree_flatten(actual),
        tree_flatten(expected),
    )
    assert structure == expected_structure
    torch.testing.assert_close(actual, expected)


def saved_and_loaded(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


def assert_exports(
    model, make_inputs, dynamic_shapes, strict=False, sizes=SIZES, rows_per_user=False
) -> None:
    """The exported model, saved and loaded, computes what the model does for all sizes.

    rows_per_user: the graph makes tensors of one row per user, whose number it knows from offsets
    alone. Torch then guards against one user unless it is told to be oblivious of sizes.
    """
    with torch.fx.experimental._config.patch(backed_size_oblivious=rows_per_user):
        program = torch.export.export(
            model, make_inputs(*SIZES[0]), dynamic_shapes=dynamic_shapes, strict=strict
        )
    exported = saved_and_loaded(program).module()
    for size in sizes:
        inputs = make_inputs(*size)
        assert_same(exported(*inputs), model(*inputs))


class Call(torch.nn.Module):
    """function(layer, *inputs), as a module of one tuple of inputs."""

    def __init__(self, function, layer=None):
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, inputs):
        return self.function(*inputs) if self.layer is None else self.function(self.layer, *inputs)


def assert_call_exports(function, layer, make_inputs, shapes, **options) -> None:
    assert_exports(
        Call(function, layer), lambda *size: (make_inputs(*size),), dict(inputs=shapes), **options
    )


LAYERS = {
    "gdpa": lambda: jm.JaggedGDPA(WIDTH, HEADS),
    "gdpa-seeds": lambda: jm.JaggedGDPA(WIDTH, HEADS, config=jm.GDPAConfig(num_seeds=3)),
    "gdpa-weights": lambda: jm.GDPABlock(WIDTH, HEADS, config=jm.GDPAConfig(num_weights=3)),
    "block": lambda: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, block_size=16, max_seqlen=100),
    "hstu": lambda: jm.HSTUStack(WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=10)),
    "mlp": lambda: jm.JaggedMLP([WIDTH, 8]),
}


@slow_after(1, "strict", [False, True], ids=["traced", "strict"])
@pytest.mark.parametrize("layer", LAYERS)
def test_layers_of_one_jagged(layer, strict):
    assert_call_exports(
        lambda layer, x: layer(x),
        LAYERS[layer](),
        lambda users, rows, _: (history(users, rows),),
        (JAGGED,),
        strict=strict,
        rows_per_user=layer == "gdpa-seeds",
    )


def test_a_bias_as_input():
    """By position. torch 2.13 exports no input with both of the names `time` and `timestamps`: it
    replaces the first in the second."""
    inputs = lambda users, rows, _: (history(users, rows), jm.RelativeBias(torch.randn(HEADS, 999)))
    assert_call_exports(
        lambda layer, x, bias: layer(x, bias=bias),
        jm.JaggedGDPA(WIDTH, HEADS),
        inputs,
        (JAGGED, [{}]),
    )


@slow_after(1, "strict", [False, True], ids=["traced", "strict"])
def test_hstu_with_biases(strict):
    stack = jm.HSTUStack(
        WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=10, relative_position=500, relative_time=8)
    )

    def inputs(users, rows, _):
        return history(users, rows), torch.randint(1000, (rows,))

    shapes = JAGGED, {0: ROWS}
    call = lambda layer, x, times: layer(x, timestamps=times)
    assert_call_exports(call, stack, inputs, shapes, strict=strict, rows_per_user=False)


@pytest.mark.parametrize("form", ["candidates", "jagged", "dense"])
def test_target_attention(form):
    def inputs(users, rows, count):
        targets = {
            "candidates": lambda: torch.randn(count, 2, WIDTH),
            "jagged": lambda: jm.Jagged(torch.randn(count, WIDTH), random_offsets(users, count)),
            "dense": lambda: torch.randn(users, 3, WIDTH),
        }[form]()
        return (
            targets,
            history(users, rows),
            *([index(users, count)] if form == "candidates" else []),
        )

    targets = {
        "candidates": {0: CANDIDATES},
        "jagged": [{0: CANDIDATES}, {0: USERS + 1}],
        "dense": {0: USERS},
    }[form]
    shapes = targets, JAGGED, *([INDEX] if form == "candidates" else [])
    sizes = [size for size in SIZES if form != "jagged" or size[0] or not size[2]]
    assert_call_exports(
        lambda layer, *x: layer(*x),
        jm.JaggedTargetAttention(WIDTH, HEADS),
        inputs,
        shapes,
        sizes=sizes,
    )


@pytest.mark.parametrize("strict", [False, True], ids=["traced", "strict"])
def test_self_target_attention(strict):
    """Without a sum of a tuple of sizes: strict export makes a torch.sym_sum of it, which
    torch.export.save of 2.13 does not know."""
    assert_call_exports(
        lambda layer, *x: layer(*x),
        jm.JaggedSelfTargetAttention(WIDTH, HEADS),
        lambda users, rows, count: (
            history(users, rows),
            torch.randn(count, 2, WIDTH),
            index(users, count),
        ),
        (JAGGED, {0: CANDIDATES}, INDEX),
        strict=strict,
        rows_per_user=True,
    )


def test_linear_compress():
    def inputs(users, _, count):
        return torch.randn(count, 10, 8), torch.randn(users, 9, 8), index(users, count)

    shapes = {0: CANDIDATES}, {0: USERS}, INDEX
    assert_call_exports(
        lambda layer, *x: layer(*x), jm.LinearCompressEmbedding(10, 4, 9), inputs, shapes
    )


@pytest.mark.parametrize("form", ["offsets", "counts", "map"])
def test_an_index_made_in_the_graph(form):
    def attend(layer, targets, history, candidates):
        if form == "map":
            made = jm.CandidateIndex.from_map(candidates, history.num_segments)
        else:
            made = getattr(jm.CandidateIndex, f"from_{form}")(candidates)
        return layer(targets, history, made)

    def inputs(users, rows, count):
        offsets = random_offsets(users, count)
        users_of = torch.randint(max(users, 1), (count,))
        candidates = {"offsets": offsets, "counts": offsets.diff(), "map": users_of}[form]
        return torch.randn(count, 1, WIDTH), history(users, rows), candidates

    shapes = (
        {0: CANDIDATES},
        JAGGED,
        {0: {"offsets": USERS + 1, "counts": USERS, "map": CANDIDATES}[form]},
    )
    assert_call_exports(attend, jm.JaggedTargetAttention(WIDTH, HEADS), inputs, shapes)


def test_an_index_in_any_order():
    def inputs(users, rows, count):
        made = jm.CandidateIndex.from_map(
            torch.cat([torch.tensor([users - 1]), torch.randint(users, (count - 1,))]), users
        )
        return torch.randn(count, 1, WIDTH), history(users, rows), made

    shapes = {0: CANDIDATES}, JAGGED, [{0: USERS + 1}, {0: CANDIDATES}, {0: CANDIDATES}]
    unsorted = [(5, 41, 11), (7, 59, 37), (2, 6, 40)]
    assert_call_exports(
        lambda layer, *x: layer(*x),
        jm.JaggedTargetAttention(WIDTH, HEADS),
        inputs,
        shapes,
        sizes=unsorted,
    )


def sorted_map(users: int, count: int) -> torch.Tensor:
    return torch.randint(max(users, 1), (count,)).sort().values


def test_an_index_of_a_sorted_map():
    """It has no permutation, which is structure: the model takes any sorted index, and no other."""

    def inputs(users, rows, count):
        return (
            torch.randn(count, 1, WIDTH),
            history(users, rows),
            jm.CandidateIndex.from_map(sorted_map(users, count), users),
        )

    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    assert_call_exports(
        lambda layer, *x: layer(*x), layer, inputs, ({0: CANDIDATES}, JAGGED, INDEX)
    )
    targets, jagged, index = inputs(*SIZES[0])
    exported = torch.export.export(layer, (targets, jagged, index)).module()
    with pytest.raises(ValueError, match="structure|spec"):
        exported(
            targets,
            jagged,
            jm.CandidateIndex.from_map(index.candidate_to_user.flip(0), index.num_users),
        )


@pytest.mark.parametrize("form", ["map", "index made in the graph"])
def test_a_model_exported_with_a_sorted_map_takes_maps_in_any_order(form):
    def attend(layer, targets, history, users):
        return layer(
            targets,
            history,
            users if form == "map" else jm.CandidateIndex.from_map(users, history.num_segments),
        )

    maps = []

    def inputs(users, rows, count):
        maps.append(sorted_map(users, count) if not maps else sorted_map(users, count).flip(0))
        return torch.randn(count, 1, WIDTH), history(users, rows), maps[-1]

    shapes = {0: CANDIDATES}, JAGGED, {0: CANDIDATES}
    assert_call_exports(
        attend, jm.JaggedTargetAttention(WIDTH, HEADS), inputs, shapes, sizes=SIZES[:3]
    )
    assert (maps[0].diff() >= 0).all() and (maps[1].diff() < 0).any()


def test_a_mask():
    def attend(x, mask):
        heads = x.values.unflatten(1, (HEADS, -1))
        return F.jagged_attention(heads, heads, heads, x.offsets, mask=mask, activation="silu")

    def inputs(users, rows, _):
        x = history(users, rows)
        return x, jm.AttentionMask(
            causal=True, window=(9, None), num_targets=random_targets(x), max_attn_len=5
        )

    assert_call_exports(attend, None, inputs, (JAGGED, [{0: USERS}]))


def test_rotary():
    def attend(x, rotary):
        heads = x.values.unflatten(1, (HEADS, -1))
        return F.block_diagonal_attention(heads, heads, heads, x.offsets, rotary=rotary)

    def inputs(users, rows, _):
        tables = jm.Rotary.from_frequencies(WIDTH // HEADS, 100)
        return history(users, rows), jm.Rotary(
            tables.cos, tables.sin, "qkv", positions=torch.randint(100, (rows,))
        )

    assert_call_exports(attend, None, inputs, (JAGGED, [{}, {}, {0: ROWS}]))


@pytest.mark.parametrize("itself", [True, False])
def test_a_score_plan(itself):
    """torch takes ints of an input as sizes from 2 on."""

    def inputs(users, rows, count):
        others = [] if itself else [random_offsets(users, count)]
        return (
            torch.randn(rows, 8),
            torch.randn(count, 8),
            F.ScorePlan.from_offsets(random_offsets(users, rows), *others),
        )

    dynamic = torch.export.Dim.DYNAMIC
    plan = [{0: dynamic}] * (2 if itself else 3) + [dynamic] * 3
    assert_call_exports(
        lambda x, y, plan: F.jagged2_softmax(
            F.jagged_jagged_bmm_jagged_out(x, x if itself else y, plan), plan
        ),
        None,
        inputs,
        ({0: dynamic}, {0: dynamic}, plan),
        sizes=[(5, 41, 11), (7, 59, 37), (1, 7, 3)],
    )


def test_a_schedule_and_a_cache():
    stack = jm.HSTUStack(WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=10))

    def inputs(users, rows, count):
        x = history(users, rows)
        lengths = x.host_lengths
        schedule = jm.zigzag_schedule(lengths, lengths, num_heads=HEADS, block_m=16, block_n=16)
        with torch.no_grad():
            return (
                x,
                schedule,
                jm.Jagged(torch.randn(count, WIDTH), random_offsets(users, count)),
                stack.cache(x),
            )

    def score(layer, x, schedule, targets, cache):
        heads = x.values.unflatten(1, (HEADS, -1))
        return F.jagged_attention(heads, heads, heads, x.offsets, schedule=schedule), layer.score(
            targets, cache
        )

    dynamic = torch.export.Dim.DYNAMIC
    kept = [{0: ROWS}, {0: USERS + 1}]
    shapes = (JAGGED, [{0: dynamic}, {}], [{0: CANDIDATES}, {0: USERS + 1}], [(kept, kept)])
    sizes = [size for size in SIZES if size[0]]
    assert_call_exports(score, stack, inputs, shapes, sizes=sizes, rows_per_user=True)


def test_containers_as_outputs():
    """The graph makes them from tensors."""

    def build(values, offsets, candidates):
        made = jm.Jagged(values * 2, offsets)
        return (
            made,
            jm.CandidateIndex.from_offsets(candidates),
            jm.AttentionMask(causal=True),
            dict(rows=made.with_values(values)),
        )

    def inputs(users, rows, count):
        return torch.randn(rows, WIDTH), random_offsets(users, rows), random_offsets(users, count)

    shapes = {0: ROWS}, {0: USERS + 1}, {0: USERS + 1}
    assert_call_exports(build, None, inputs, shapes)
    graph = torch.compile(build, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in SIZES[:3]:
        given = inputs(*size)
        assert_same(graph(*given), build(*given))


def test_a_compiled_function_takes_and_returns_containers():
    def double(x, candidates):
        return tree_map(lambda tensor: tensor * 2, x), candidates

    graph = torch.compile(double, fullgraph=True, dynamic=True, backend="aot_eager")
    x, candidates = jm.Jagged(torch.randn(5, 4), torch.tensor([0, 2, 5])), index(2, 7)
    doubled, same = graph(x, candidates)
    assert torch.equal(doubled.values, x.values * 2) and torch.equal(doubled.offsets, x.offsets * 2)
    assert_same(same, candidates)


def test_another_structure_is_an_error():
    x = jm.Jagged(torch.randn(5, WIDTH), torch.tensor([0, 2, 5]), max_seqlen=8)
    layer = Call(lambda layer, x: layer(x), jm.HSTULayer(WIDTH, HEADS))
    exported = torch.export.export(layer, ((x,),)).module()
    assert_same(exported((x,)), layer((x,)))
    with pytest.raises(ValueError, match="(?s)max_seqlen|structure|spec"):
        exported((jm.Jagged.wrap(x, max_seqlen=7),))


# -- as pytrees ------------------------------------------------------------------------------------

OFFSETS = torch.tensor([0, 2, 5])
CONTAINERS = {
    "Jagged": lambda: jm.Jagged(torch.randn(5, 4), OFFSETS, max_seqlen=3),
    "CandidateIndex": lambda: jm.CandidateIndex.from_map(torch.tensor([1, 0, 1]), 2),
    "CandidateIndex-sorted": lambda: jm.CandidateIndex.from_counts(torch.tensor([1, 2])),
    "AttentionMask": lambda: jm.AttentionMask(
        causal=True, window=(3, None), num_targets=torch.tensor([1, 2])
    ),
    "RelativeBias": lambda: jm.RelativeBias(
        torch.randn(5), torch.randn(4), timestamps=torch.arange(5), query_shift=torch.tensor([1, 2])
    ),
    "RelativeBias-position": lambda: jm.RelativeBias(torch.randn(2, 5)),
    "AttentionMask-plain": lambda: jm.AttentionMask(max_attn_len=3),
    "AttentionMask-prefix": lambda: jm.AttentionMask(
        window=(3, None), global_prefix=2, recent_history=5
    ),
    "Rotary": lambda: jm.Rotary.from_frequencies(4, 10, "qkv"),
    "ScorePlan": lambda: F.ScorePlan.from_offsets(OFFSETS, torch.tensor([0, 1, 2])),
    "TileSchedule": lambda: host_schedule(
        *[torch.tensor([2, 0, 3])] * 2, num_heads=2, num_kv_heads=2, head_dim=8, dtype=torch.float32
    ),
    "HistoryCache-timed": lambda: jm.HSTUStack(
        8, 2, 2, jm.HSTUConfig(scaling_seqlen=10, relative_time=4)
    ).cache((torch.randn(5, 8), OFFSETS), torch.arange(5)),
    "HistoryCache": lambda: jm.HSTUStack(8, 2, 2, jm.HSTUConfig(scaling_seqlen=10)).cache(
        (torch.randn(5, 8), OFFSETS)
    ),
}


@pytest.fixture(params=CONTAINERS)
def container(request):
    return CONTAINERS[request.param]()


def test_no_field_is_lost():
    times, shift = torch.arange(3), torch.tensor([1])
    for x, fields in (
        (
            jm.Jagged(torch.randn(3, 2), torch.tensor([0, 3]), 5),
            ("values", "offsets", "max_seqlen"),
        ),
        (
            jm.RelativeBias(
                torch.randn(9), torch.randn(4), times, torch.arange(3), times + 1, shift
            ),
            None,
        ),
        (
            jm.Rotary(
                torch.randn(4, 2), torch.randn(4, 2), "qkv", times, linear=True, precise=True
            ),
            None,
        ),
        (jm.AttentionMask(True, (3, 2), shift, 2, 1, 3, 1, 4, 5), None),
    ):
        copy = tree_unflatten(*tree_flatten(x))
        for name in fields or [field.name for field in dataclasses.fields(x)]:
            assert getattr(copy, name) is getattr(x, name), name


def test_maps_give_the_same_kind(container):
    leaves, structure = tree_flatten(container)
    ints = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
    assert len(ints) == (3 if isinstance(container, F.ScorePlan) else 0)
    copy = tree_map(
        lambda leaf: leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf, container
    )
    assert type(copy) is type(container) and tree_flatten(copy)[1] == structure
    assert all(
        leaf.device.type == "meta" for leaf in tree_leaves(copy) if isinstance(leaf, torch.Tensor)
    )
    assert_same(tree_unflatten(leaves, structure), container)


def test_a_rebuilt_container_is_not_checked(container):
    """A tree map may return anything: sizes, names, None."""
    for leaf in (None, "name", -1, torch.tensor(-1.5)):
        assert type(tree_map(lambda _, leaf=leaf: leaf, container)) is type(container)


def test_weights_only_loads_it(container, tmp_path):
    torch.save(container, tmp_path / "container.pt")
    assert_same(torch.load(tmp_path / "container.pt", weights_only=True), container)


@pytest.mark.parametrize("kind", [jm.Jagged, jm.CandidateIndex])
def test_the_same_offsets_keep_the_segmentation(kind):
    """As in FSDP, which flattens inputs and outputs: segmentation ids, host lengths and schedules
    are found again, on a device too."""
    made = (
        jm.Jagged(torch.randn(5, 4), OFFSETS.clone())
        if kind is jm.Jagged
        else jm.CandidateIndex.from_counts(torch.tensor([2, 3]))
    )
    lengths = (lambda x: x.host_lengths) if kind is jm.Jagged else (lambda x: x.host_counts)
    for x in (made, made.to("meta")):
        copy = tree_map(lambda tensor: tensor, x)
        assert copy is not x and copy.segmentation_id == x.segmentation_id
        assert lengths(copy).tolist() == [2, 3]
        assert lengths(copy) is lengths(x)


def test_other_offsets_are_another_segmentation():
    x = jm.Jagged(torch.randn(5, 4), OFFSETS)
    zeros = tree_map(torch.zeros_like, x)
    assert zeros.segmentation_id != x.segmentation_id and zeros.host_lengths.tolist() == [0, 0]
    moved = tree_map(lambda tensor: tensor.to("meta"), x)
    assert moved.segmentation_id != x.segmentation_id and moved.host_lengths is None, (
        "only the device knows what the map did"
    )
    offsets = OFFSETS.clone()
    x = jm.Jagged(torch.randn(5, 4), offsets)
    leaves, structure = tree_flatten(x)
    offsets[1] = 3
    assert tree_unflatten(leaves, structure).host_lengths.tolist() == [3, 2]


def test_a_plan_of_a_sequence_with_itself_stays_one():
    plan = F.ScorePlan.from_offsets(OFFSETS)
    moved = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, plan)
    assert moved.y_offsets is moved.x_offsets


@pytest.mark.filterwarnings("ignore")  # torch warns that torch.jit.trace is deprecated
def test_torch_jit_trace_is_told_to_use_torch_export():
    layer = jm.JaggedTargetAttention(WIDTH, HEADS)
    inputs = (
        torch.randn(3, 1, WIDTH),
        (torch.randn(5, WIDTH), torch.tensor([0, 2, 5])),
        torch.tensor([1, 0, 1]),
    )
    with pytest.raises(
        TypeError,
        match="num_users must be an int, got Tensor: torch.jit.trace makes .*; use torch.export",
    ):
        torch.jit.trace(layer, inputs)
    with pytest.raises(RuntimeError, match="recorded by torch.jit.trace: use torch.export"):
        torch.jit.trace(jm.JaggedGDPA(WIDTH, HEADS), inputs[1:2])


@pytest.mark.slow
def test_a_package_of_aot_inductor(tmp_path):
    """Of an operator. A package of layers, in tests/examples/test_cpp.py, is not slow."""

    class Attend(torch.nn.Module):
        def forward(self, q, k, v, offsets):
            return F.jagged_attention(q, k, v, offsets)

    def inputs(users, rows, _):
        return *(torch.randn(rows, HEADS, 16) for _ in "qkv"), random_offsets(users, rows)

    shapes = {name: {0: torch.export.Dim.DYNAMIC} for name in ("q", "k", "v", "offsets")}
    program = torch.export.export(Attend(), inputs(*SIZES[0]), dynamic_shapes=shapes)
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(tmp_path / "attend.pt2")
    )
    package = torch._inductor.aoti_load_package(path)
    for sizes in SIZES[:2]:
        given = inputs(*sizes)
        torch.testing.assert_close(package(*given), Attend()(*given))
