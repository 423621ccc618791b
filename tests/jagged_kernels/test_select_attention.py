"""Which kernels an attention call takes, and with which tiles: every rule at its edges. No GPU: the
compute capability is an argument."""

import itertools

import pytest
import torch
from jagged_kernels.attention import select as module
from jagged_kernels.attention.configs import attention_config, hopper_attention_config
from jagged_kernels.attention.params import MaskParams
from jagged_kernels.attention.select import FEW_KEYS, AttentionProblem, select

import jagged_modules as jm
from jagged_modules.activations import ACTIVATIONS

A100, L4, H100, B200 = (8, 0), (8, 9), (9, 0), (10, 0)
LONG = dict(q_rows=64 * 500, q_segments=64, kv_rows=64 * 500, kv_segments=64)
HOPPER_KERNELS = ("fwd", "dq", "dkdv")


def problem(head_dim=128, v_dim=None, dtype=torch.bfloat16, capability=H100, **options):
    return AttentionProblem(
        head_dim, head_dim if v_dim is None else v_dim, dtype, capability, **options
    )


def sizes(q_seqlen, kv_seqlen, segments=64):
    return dict(
        q_rows=q_seqlen * segments,
        q_segments=segments,
        kv_rows=kv_seqlen * segments,
        kv_segments=segments,
    )


BACKENDS = [  # what differs from long segments of head dim 128 in bf16 on an H100 → backend
    (dict(), "hopper"),
    (dict(dtype=torch.float16), "hopper"),
    (dict(dtype=torch.float32), "triton"),
    (dict(capability=A100), "triton"),
    (dict(capability=L4), "triton"),
    (dict(capability=B200), "triton"),
    (dict(capability=None), "triton"),
    (dict(implementation="triton"), "triton"),
    (dict(head_dim=32), "triton"),
    (dict(head_dim=40), "hopper"),
    (dict(head_dim=44), "triton"),
    (dict(head_dim=64), "hopper"),
    (dict(head_dim=72), "hopper"),
    (dict(head_dim=64, v_dim=40), "hopper"),
    (dict(head_dim=64, v_dim=72), "triton"),
    (dict(head_dim=64, v_dim=60), "triton"),
    (dict(head_dim=136), "hopper"),
    (dict(head_dim=256, v_dim=200), "hopper"),
    (dict(head_dim=128, v_dim=136), "triton"),
    (dict(head_dim=140), "triton"),
    (dict(head_dim=136, biased=True), "triton"),
    (dict(head_dim=136, activation="gelu_taylor"), "triton"),
    (dict(misaligned=("q",)), "triton"),
    (dict(activation="gelu_taylor"), "triton"),
    (dict(activation="gelu_taylor", head_dim=72), "triton"),
    (dict(activation="gelu_taylor", head_dim=64), "hopper"),
    (dict(activation="gelu_taylor", head_dim=64, biased=True), "triton"),
    (dict(activation="gelu"), "hopper"),
    (dict(activation="gelu", biased=True), "hopper"),
    (dict(activation="gelu", head_dim=64), "hopper"),
    (dict(activation="gelu", head_dim=64, biased=True), "triton"),
    (dict(activation="gelu_tanh", head_dim=64, biased=True), "hopper"),
    (dict(masked=True), "hopper"),
    (dict(dropout=True), "hopper"),
    (dict(dropout=True, biased=True), "triton"),
    (dict(dropout=True, biased=True, implementation="hopper"), "hopper"),
    (sizes(1, 1), "hopper"),
    (sizes(32, 32) | dict(biased=True), "hopper"),
    (sizes(31, 33) | dict(biased=True), "triton"),
    (sizes(31, 33) | dict(biased=True, batch_invariant=True), "hopper"),
    (sizes(31, 33) | dict(biased=True, implementation="hopper"), "hopper"),
    (dict(activation="gelu_taylor", implementation="hopper"), "hopper"),
    (dict.fromkeys(LONG), "hopper"),
    (dict(q_rows=0), "hopper"),  # a schedule has the same tiles as one with rows
    (dict(q_rows=0, misaligned=("q",)), "hopper"),
    (dict(kv_rows=0, misaligned=("k",), implementation="hopper"), "hopper"),
    # 3 rows with every segment's 342 keys
    (dict(biased=True, q_shared=True, q_rows=3, kv_rows=64 * 342), "hopper"),
    (dict(biased=True, q_shared=True, q_rows=3, kv_rows=64 * 341), "triton"),
    (
        dict(biased=True, kv_shared=True, q_rows=1024, q_segments=1, kv_rows=1, kv_segments=1),
        "hopper",
    ),
    (
        dict(biased=True, kv_shared=True, q_rows=1023, q_segments=1, kv_rows=1, kv_segments=1),
        "triton",
    ),
]


@pytest.mark.parametrize("change, backend", BACKENDS, ids=[str(change) for change, _ in BACKENDS])
def test_backend(change, backend):
    assert select(problem(**(LONG | change))).backend == backend


REFUSED = [
    (
        dict(dtype=torch.float32),
        "got torch.float32 on compute capability 9.0, head dims 128 and 128",
    ),
    (
        dict(capability=A100),
        "a GPU of compute capability 9.0, .* got torch.bfloat16 on compute capability 8.0",
    ),
    (dict(capability=None), "got torch.bfloat16 on no GPU"),
    (
        dict(head_dim=32),
        (
            "head dims of q and v both 40 to 64, 72 to 128 or 136 to 256, in multiples of 8; got .*"
            " head dims 32 and 32"
        ),
    ),
    (dict(v_dim=64), "head dims 128 and 64"),
    (
        dict(misaligned=("q [8, 2, 64] with strides (130, 65, 1)",)),
        r"begin at 16-byte boundaries, .*got q \[8, 2, 64\] with strides",
    ),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_an_explicit_request_never_falls_back(change, message):
    with pytest.raises(ValueError, match=f"implementation 'hopper' takes .*{message}"):
        select(problem(**(LONG | change), implementation="hopper"))


# what differs from head dim 64 in bf16 on an A100, without a schedule → query tile, key tile
TRITON_TILES = [
    (dict(), 128, 64),
    (dict(head_dim=72), 64, 64),
    (dict(head_dim=64, v_dim=72), 64, 64),
    (dict(head_dim=256), 64, 64),
    (dict(dtype=torch.float32), 64, 64),
    (dict(dtype=torch.float32, head_dim=128), 64, 64),
    (dict(dtype=torch.float32, head_dim=129), 32, 32),
    (sizes(64, 500), 64, 64),
    (sizes(65, 500), 128, 64),
    (sizes(64, 500) | dict(batch_invariant=True), 128, 64),
    (dict(q_shared=True, q_rows=64), 64, 64),
    (dict(q_shared=True, q_rows=65), 128, 64),
    (dict(schedule=(64, 32)), 64, 32),
    (dict(schedule=(16, None)), 16, 64),
    (dict(schedule=(192, 128)), 128, 64),
    (sizes(10, 500) | dict(schedule=(128, 64)), 128, 64),  # a schedule's tile stays
    (dict(schedule=(16, 16), batch_invariant=True), 128, 64),
]


@pytest.mark.parametrize(
    "change, query, key", TRITON_TILES, ids=[str(change) for change, _, _ in TRITON_TILES]
)
def test_tiles_of_the_portable_kernels(change, query, key):
    selection = select(problem(**(dict(head_dim=64, capability=A100) | LONG | change)))
    assert (selection.fwd.tile, selection.dq.tile, selection.dkdv.tile) == (query, query, key)
    assert (selection.tile.query, selection.tile.key) == (query, key)


@pytest.mark.parametrize("head_dim, tiles", [(64, (192, 192, 128)), (128, (128, 128, 128))])
@pytest.mark.parametrize("schedule", [(None, None), (16, 16), (64, 64)])
def test_hoppers_tiles_are_its_own(head_dim, tiles, schedule):
    selection = select(problem(head_dim, **sizes(640, 640), schedule=schedule))
    assert tuple(config.tile for config in (selection.fwd, selection.dq, selection.dkdv)) == tiles


def test_a_schedule_made_without_the_activation_has_hoppers_tiles():
    """Hopper's tiles do not depend on the activation. A time table makes a difference at head dims
    up to 64."""
    for dim in (64, 96, 128):
        options = list(itertools.product(ACTIVATIONS, *[[False, True]] * 3))  # masked, biased, long
        tiles = {
            kernel: {hopper_attention_config(kernel, dim, *option).tile for option in options}
            for kernel in HOPPER_KERNELS
        }
        assert all(len(rows) == 1 for rows in tiles.values()) and tiles["fwd"] == tiles["dq"]
    timed = dict(biased=True, timed=True)
    assert (
        select(problem(64, **LONG, **timed)).tile
        == select(problem(128, **LONG, **timed)).tile
        == select(problem(128, **LONG)).tile
    )


@pytest.mark.parametrize(
    # change: of mean lengths → whether tiles of queries and of keys are small
    "head_dim, change, queries, keys",
    [
        (64, sizes(639, 639), True, True),
        (64, sizes(640, 640), False, False),
        (64, sizes(640, 639), False, True),
        (64, sizes(256, 640), True, False),
        (64, sizes(255, 640), True, True),
        (40, sizes(319, 319) | dict(masked=True), True, True),
        (64, sizes(320, 320) | dict(masked=True), False, False),
        (64, sizes(2000, 2000) | dict(activation="gelu"), True, False),
        (64, sizes(2000, 2000) | dict(activation="gelu_taylor"), True, False),
        (64, sizes(2000, 2000) | dict(activation="gelu", masked=True), True, False),
        (72, sizes(127, 10), True, False),
        (128, sizes(128, 10), False, False),
        (128, sizes(63, 63) | dict(masked=True), True, False),
        (128, sizes(64, 64) | dict(masked=True), False, False),
        (64, sizes(10, 10) | dict(batch_invariant=True), False, False),
        (64, sizes(639, 639) | dict(biased=True, masked=True), True, True),
        (
            64,
            sizes(640, 640) | dict(biased=True, activation="gelu", implementation="hopper"),
            False,
            False,
        ),
        (64, sizes(255, 255) | dict(biased=True, timed=True), True, True),
        (64, sizes(256, 256) | dict(biased=True, timed=True, masked=True), False, False),
        (128, sizes(127, 127) | dict(biased=True, masked=True), True, False),
        (128, sizes(255, 255) | dict(biased=True, timed=True), True, False),
        (64, {}, False, False),
    ],
    ids=str,
)
def test_hoppers_tiles_are_small_where_segments_are_short(head_dim, change, queries, keys):
    selection = select(problem(head_dim, **change))
    fwd, dq, dkdv = selection.fwd, selection.dq, selection.dkdv
    assert [config.consumers == 1 for config in (fwd, dq, dkdv)] == [queries, queries, keys]
    assert fwd.tile == dq.tile, "they share a list of tiles"
    for config in (fwd, dq, dkdv):
        assert config.tile == 64 * config.consumers and (config.ctas_per_sm > 1) == (
            config.consumers == 1
        )


@pytest.mark.parametrize(
    "change, small",
    [
        (dict(), True),
        (sizes(2000, FEW_KEYS), False),
        (dict(head_dim=72), False),
        (dict(masked=True), False),
        (dict(biased=True), False),
        (dict(dropout=True, implementation="hopper"), False),
        (dict(batch_invariant=True), False),
    ],
    ids=str,
)
def test_query_tiles_are_small_where_segments_have_few_keys(change, small):
    options = dict(head_dim=64) | sizes(2000, FEW_KEYS - 1) | change
    selection = select(problem(**options))
    assert [x.consumers == 1 for x in (selection.fwd, selection.dq)] == [small, small]


def test_blocks_are_small_where_query_segments_are_short():
    assert [select(problem(64, **sizes(length, 300))).dkdv.block for length in (255, 256)] == [
        32,
        64,
    ]


@pytest.mark.parametrize(
    "head_dim, masked, below, from_on",
    [
        (128, False, 383, 384),
        (64, False, 767, 768),
        (72, False, 383, 384),
        (128, True, 1535, 1536),
        (64, True, 3071, 3072),
    ],
)
def test_hoppers_key_blocks_are_larger_where_segments_are_long(head_dim, masked, below, from_on):
    blocks = [
        select(problem(head_dim, masked=masked, **sizes(700, length))).fwd.block
        for length in (below, from_on)
    ]
    assert blocks == [64, 128]
    assert (
        select(
            problem(head_dim, masked=masked, batch_invariant=True, **sizes(700, from_on))
        ).fwd.block
        == 64
    )
    assert select(problem(head_dim, masked=masked)).fwd.block == 64, (
        "nothing is known of the segments"
    )


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hoppers_blocks_are_small_with_dropout(head_dim):
    """Random numbers take registers."""
    options = dict(head_dim=head_dim, **sizes(4096, 4096))
    selection = select(problem(**options, dropout=True, implementation="hopper"))
    assert (selection.fwd.block, selection.dkdv.block) == (64, 64)
    assert select(problem(**options)).fwd.block == 128


def test_portable_blocks_are_larger_where_a_tile_loops_over_many_rows():
    """For `dkdv`, the number of queries that read a tile of keys decides; for the forward and dq,
    the number of keys."""
    short, long = (attention_config(128, 2, A100, 64, long) for long in (False, True))
    assert short.dq.block < long.dq.block and short.dkdv.block < long.dkdv.block

    def blocks(**change):
        selection = select(problem(capability=A100, **change))
        return selection.dq.block, selection.dkdv.block

    assert blocks(**sizes(768, 767)) == (short.dq.block, long.dkdv.block)
    assert blocks(**sizes(767, 768)) == (long.dq.block, short.dkdv.block)
    assert blocks(**sizes(768, 768)) == (long.dq.block, long.dkdv.block)
    assert blocks(**sizes(768, 768), masked=True) == (short.dq.block, short.dkdv.block)
    assert blocks(**sizes(768, 768), batch_invariant=True) == (short.dq.block, short.dkdv.block)
    shared = dict(q_shared=True, q_rows=768, q_segments=64, kv_rows=64, kv_segments=64)
    assert (
        blocks(**shared)[1] == long.dkdv.block
        and blocks(**shared | dict(q_rows=767))[1] == short.dkdv.block
    )
    groups = dict(q_rows=2 * 64 * 384, q_segments=2 * 64, kv_rows=64, kv_segments=64)
    assert blocks(**groups)[1] == long.dkdv.block, "a tile of keys meets the queries of both groups"


def test_gpus_with_little_shared_memory_keep_small_blocks():
    for capability in ((8, 6), L4, (12, 0)):
        assert select(problem(capability=capability, **sizes(800, 800))).dq.block == 32


@pytest.mark.parametrize(
    "q_rows, kv_rows, num_kv_heads, num_sms, chunks",
    [
        (256, 10, 1, 132, 1),  # chunks of at least 256 rows
        (257, 10, 1, 132, 2),
        (100_000, 64, 1, 132, 264),  # two tiles for each multiprocessor
        (100_000, 64, 4, 132, 66),
        (100_000, 65, 4, 132, 33),
        (100_000, 100_000, 4, 132, 1),
        (0, 64, 4, 132, 1),
        (100_000, 0, 4, 132, 264),
    ],
)
def test_query_rows_are_split_where_all_segments_share_the_keys(
    q_rows, kv_rows, num_kv_heads, num_sms, chunks
):
    shared = dict(
        q_rows=q_rows,
        q_segments=1,
        kv_rows=kv_rows,
        kv_segments=1,
        num_kv_heads=num_kv_heads,
        num_sms=num_sms,
    )
    assert select(problem(capability=A100, kv_shared=True, **shared)).query_chunks == chunks
    assert select(problem(capability=A100, masked=True, **shared)).query_chunks == 1


@pytest.mark.parametrize(
    "segments, q_rows, kv_rows, chunks",
    [
        (1, 640_000, 128, 33),
        (10, 640_000, 1280, 3),
        (100, 640_000, 12_800, 1),
        (1, 8000, 128, 1),
        (1, 8192, 128, 32),
        (1, 640_000, 100_000, 1),
    ],
)
def test_many_query_rows_of_few_segments_are_split(segments, q_rows, kv_rows, chunks):
    of_rows = dict(q_rows=q_rows, kv_rows=kv_rows, num_kv_heads=4, num_sms=132)
    given = dict(q_segments=segments, kv_segments=segments, capability=A100, **of_rows)
    assert select(problem(**given)).query_chunks == chunks
    for changed in ("masked", "biased", "dropout", "self_attention", "q_shared", "batch_invariant"):
        assert select(problem(**given, **{changed: True})).query_chunks == 1


def test_hopper_splits_query_rows_by_its_own_tile():
    shared = dict(
        kv_shared=True,
        q_rows=100_000,
        q_segments=1,
        kv_rows=65,
        kv_segments=1,
        num_kv_heads=4,
        num_sms=132,
    )
    assert [
        select(problem(capability=capability, **shared)).query_chunks for capability in (A100, H100)
    ] == [33, 66]


@pytest.mark.parametrize(
    "keys, change, whole",
    [
        (64, {}, (True, True)),
        (128, {}, (True, True)),
        (100, {}, (False, False)),
        (512, {}, (True, True)),
        (576, {}, (False, False)),  # no longer faster
        (128, dict(kv_shared=False), (False, False)),  # the user's, which have any length
    ],
)
def test_hopper_leaves_out_the_ends_of_shared_keys_that_are_whole_blocks(keys, change, whole):
    rows = dict(q_rows=100_000, q_segments=1, kv_rows=keys, kv_segments=1)
    selection = select(problem(64, **(rows | dict(kv_shared=True) | change)))
    assert (selection.fwd.whole_blocks, selection.dq.whole_blocks) == whole
    assert not selection.dkdv.whole_blocks
    assert selection.fwd.consumers == (3 if whole[0] or keys >= FEW_KEYS else 1)
    assert selection.fwd.block == (128 if keys == 128 and whole[0] else 64)


@pytest.mark.parametrize(
    "capability, tma",
    [(None, False), ((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)],
    ids=str,
)
def test_portable_kernels_use_the_tensor_memory_accelerator_where_there_is_one(capability, tma):
    assert select(problem(dtype=torch.float32, capability=capability)).tma == tma


def test_equal_problems_give_one_selection():
    """This saves host time at each launch. The cache does not grow with the number of batches."""
    assert select(problem(**sizes(400, 500))) is select(problem(**sizes(500, 600)))
    assert select(problem(capability=A100, **sizes(400, 500))) is select(
        problem(capability=A100, **sizes(401, 501))
    )


def rows(number):
    return dict(q_rows=number, kv_rows=number)


CROSS = dict(self_attention=False)
SHORT_BATCH = dict(self_attention=True, num_kv_heads=4, num_sms=132) | sizes(55, 55, segments=2048)


@pytest.mark.parametrize(
    "change, forward, backward",
    [
        (dict(), False, True),
        (dict(capability=A100), True, True),
        (dict(implementation="triton"), True, True),
        (dict(masked=True, activation="silu", head_dim=24), True, True),
        (rows(512 * 33), True, True),
        (rows(512 * 33 - 1), False, False),
        (rows(2048 * 32 - 1), True, True),
        (rows(2048 * 32), False, True),
        (rows(2048 * 64 - 1) | dict(capability=A100), True, True),
        (rows(2048 * 64) | dict(capability=A100), False, True),
        (rows(2048 * 128 - 1), False, True),
        (rows(2048 * 128), False, False),
        (CROSS, False, False),
        (CROSS | dict(capability=A100), True, True),
        (CROSS | sizes(10, 23, 4096), True, True),
        (CROSS | sizes(23, 10, 4096), True, True),
        (CROSS | sizes(10, 24, 4096), False, True),
        (CROSS | sizes(24, 10, 4096) | dict(masked=True), False, True),
        (CROSS | sizes(10, 31, 4096), False, True),
        (CROSS | sizes(10, 32, 4096), False, False),
        (CROSS | sizes(1, 63, 2048) | dict(capability=A100), True, True),
        (CROSS | sizes(64, 10, 2048) | dict(capability=A100), False, False),
        (CROSS | sizes(1, 22, 768), True, True),
        (CROSS | sizes(1, 22, 767), False, False),
        (CROSS | dict(q_segments=1024), False, False),  # two groups of queries or of keys
        (CROSS | dict(q_segments=4096), False, False),
        (CROSS | dict(q_shared=True, q_rows=20), False, False),
        (CROSS | dict(kv_shared=True, kv_segments=1, q_segments=1), False, False),
        (CROSS | dict(paged=True), False, False),
        (CROSS | dict(implementation="hopper"), False, False),
        (CROSS | dict(batch_invariant=True), False, False),
        (CROSS | dict(biased=True), False, False),
        (dict(implementation="hopper"), False, False),
        (dict(batch_invariant=True), False, False),
        (dict(biased=True), False, False),
        (dict(dtype=torch.float32), False, False),
        (dict(v_dim=136), False, False),
    ],
    ids=str,
)
def test_short_segments_are_packed_where_they_fill_the_gpu(monkeypatch, change, forward, backward):
    selection = select(problem(**SHORT_BATCH | change))
    assert (selection.packed_fwd is not None, selection.packed_bwd is not None) == (
        forward,
        backward,
    )
    monkeypatch.setattr(module, "packed_tiles_are_faster", lambda *_: (False, False))
    assert selection._replace(packed_fwd=None, packed_bwd=None) == select(
        problem(**SHORT_BATCH | change)
    )


def test_packed_tiles_replace_the_kernel_of_few_queries():
    """Above head dim 64, where both take short histories."""
    batch = dict(num_heads=4, num_kv_heads=4, num_sms=132)
    packed, few_queries = (
        select(problem(**batch, **sizes(10, length, 4096))) for length in (31, 32)
    )
    assert (
        packed.packed_bwd is not None
        and packed.short_queries is None
        and packed.dq.tile == packed.fwd.tile
    )
    assert few_queries.packed_bwd is None and few_queries.short_queries is not None


WIDE = dict(activation="silu", head_dim=128, v_dim=128)


@pytest.mark.parametrize(
    "change, expected",
    [
        (dict(), True),
        (sizes(640, 639), False),
        (sizes(639, 640), False),  # small tiles
        (sizes(639, 640) | dict(head_dim=128, v_dim=128), True),
        (dict(masked=True, causal=True), True),
        (dict(masked=True), False),
        (dict(masked=True, targets=True), True),
        (dict(activation="silu"), True),
        (WIDE, False),
        (WIDE | dict(masked=True, causal=True, targets=True), False),
        (WIDE | sizes(3072, 3072) | dict(masked=True, causal=True, targets=True), True),
        (WIDE | dict(masked=True, targets=True), True),
        (dict(biased=True), True),
        (dict(biased=True, timed=True), False),
        (dict(q_segments=128, q_rows=128 * 640), False),  # two groups of queries
        (dict(batch_invariant=True), False),
        (dict.fromkeys(LONG), False),
    ],
    ids=str,
)
def test_tiles_of_long_segments_are_assigned_dynamically(change, expected):
    assert select(problem(64, **sizes(640, 640))._replace(**change)).fwd.dynamic_tiles == expected


@pytest.mark.parametrize(
    "change, shortest",
    [
        (dict(), 384),
        (dict(masked=True), 4 * 384),
        (dict(masked=True, causal=True, targets=True), 4 * 384),
        (dict(masked=True, targets=True), 10 * 384),
    ],
    ids=str,
)
def test_blocks_of_128_keys_of_long_segments(change, shortest):
    for length, block in ((shortest - 1, 64), (shortest, 128)):
        assert select(problem(**sizes(length, length))._replace(**change)).fwd.block == block


LONGEST = 2560  # rows of a segment from which on one kernel is faster for all head dims


@pytest.mark.parametrize(
    "change, expected",
    [
        (dict(), True),
        (sizes(LONGEST, 319), False),
        (sizes(79, LONGEST), False),
        (dict(masked=True), False),
        (dict(masked=True, causal=True), True),
        (dict(biased=True), False),
        (dict(dropout=True), False),
        (dict(batch_invariant=True), False),
        (dict(q_shared=True), False),
        (dict(kv_shared=True, kv_segments=1), False),
        (dict(q_segments=128, q_rows=128 * LONGEST), False),  # two groups of queries
        (dict(capability=A100), False),
        (dict(implementation="triton"), False),
        (dict(implementation="hopper"), True),
        (dict.fromkeys(LONG), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 128])
def test_one_kernel_for_all_gradients_of_long_segments(dim, change, expected):
    selection = select(problem(dim, **(sizes(LONGEST, LONGEST) | change)))
    assert (selection.one_pass is not None) == expected
    if expected:
        assert selection.one_pass.tile == selection.dkdv.tile == selection.tile.key


@pytest.mark.parametrize(
    "dim, masked, least",
    [(40, False, 573), (64, True, 1024), (72, False, 363), (128, False, 363), (128, True, 2560)],
)
def test_how_long_segments_are_for_one_kernel(dim, masked, least):
    for seqlen in (least - 1, least):
        found = select(
            problem(
                dim,
                masked=masked,
                causal=masked,
                num_heads=8,
                num_kv_heads=8,
                **sizes(seqlen, seqlen),
            )
        )
        assert (found.one_pass is not None) == (seqlen >= least)


@pytest.mark.parametrize(
    "dim, change, expected",
    [
        (64, sizes(100, 3300), True),
        (64, sizes(100, 3200), False),  # scores
        (64, sizes(79, 8192), False),  # a tile of another kernel takes all queries
        (64, sizes(2000, 511), False),
        (128, sizes(100, 1311), True),
        (128, sizes(100, 1310), False),
        (128, sizes(2000, 319), False),
        (64, dict(q_segments=8, kv_segments=8, q_rows=8 * 1024, kv_rows=8 * 1024), True),
        # keys of 4 heads do not fill the GPU
        (64, dict(q_segments=7, kv_segments=7, q_rows=7 * 1024, kv_rows=7 * 1024), False),
        # nor do queries
        (64, dict(q_segments=2, kv_segments=2, q_rows=2 * 512, kv_rows=2 * 8192), False),
        (128, dict(q_segments=6, kv_segments=6, q_rows=6 * 4096, kv_rows=6 * 4096), True),
        (
            128,
            dict(q_segments=6, kv_segments=6, q_rows=6 * 4096, kv_rows=6 * 4096, num_kv_heads=2),
            False,
        ),
        (
            128,
            dict(
                q_segments=2,
                kv_segments=2,
                q_rows=2 * 4096,
                kv_rows=2 * 4096,
                masked=True,
                causal=True,
            ),
            False,
        ),
        (
            128,
            dict(
                q_segments=3,
                kv_segments=3,
                q_rows=3 * 4096,
                kv_rows=3 * 4096,
                masked=True,
                causal=True,
            ),
            True,
        ),
    ],
    ids=str,
)
def test_which_sizes_one_kernel_takes(dim, change, expected):
    found = select(problem(dim, **(dict(num_heads=4, num_kv_heads=4) | change)))
    assert (found.one_pass is not None) == expected
    assert found.tile.key == (found.one_pass or found.dkdv).tile


TARGETS = dict(num_heads=4, num_kv_heads=4, q_segments=1024, kv_segments=1024, kv_rows=1024 * 300)


@pytest.mark.parametrize(
    "dim, seqlen, consumers",
    [
        (64, 1, 1),
        (64, 35, 1),
        (40, 36, 2),
        (64, 59, 2),
        (64, 60, 3),
        (64, 119, 3),
        (64, 120, 0),
        (128, 35, 1),
        (72, 36, 2),
        (128, 109, 2),
        (128, 110, 0),
    ],
)
def test_one_kernel_for_all_gradients_of_few_queries(dim, seqlen, consumers):
    selection = select(problem(dim, **TARGETS, q_rows=1024 * seqlen))
    assert (selection.short_queries is not None) == (consumers > 0)
    if consumers:
        assert selection.short_queries.tile == selection.dq.tile == 64 * consumers


@pytest.mark.parametrize(
    "change",
    [
        dict(masked=True),
        dict(biased=True),
        dict(dropout=True, implementation="hopper"),
        dict(self_attention=True),
        dict(batch_invariant=True),
        dict(q_shared=True),
        dict(kv_shared=True, kv_segments=1),
        dict(q_segments=2048),
        dict(num_kv_heads=2),
        dict(num_heads=8, num_kv_heads=4),
        dict(kv_rows=2**16 - 1),
        dict(kv_rows=1024 * 63),  # at head dims up to 64
        dict(capability=A100),
        dict(implementation="triton"),
    ],
    ids=str,
)
def test_which_calls_have_no_kernel_of_few_queries(change):
    assert select(problem(64, **TARGETS | dict(q_rows=1024 * 10))).short_queries is not None
    assert select(problem(64, **TARGETS | dict(q_rows=1024 * 10) | change)).short_queries is None


def test_the_causal_mask_hides_later_keys_alone():
    masks = [jm.AttentionMask(causal=True, min_full_attn_seqlen=0)]
    assert all(MaskParams(*mask.params).is_causal for mask in masks)
    others = (
        dict(),
        dict(causal=True, window=(5, None)),
        dict(causal=True, num_targets=torch.tensor([1])),
        dict(causal=True, contextual_seqlen=2),
        dict(causal=True, max_attn_len=3),
        dict(causal=True, recent_history=5),
        dict(causal=True, global_prefix=3, window=(9, None)),
    )
    assert not any(MaskParams(*jm.AttentionMask(**fields).params).is_causal for fields in others)
