"""Mistakes that torch or Python would report in words of their own, or that would give a wrong
result silently."""

import re
from array import array

import pytest
import torch
from marks import raising

import jagged_modules as jm
from jagged_modules import functional as F

WIDTH, OFFSETS, USERS = 8, torch.tensor([0, 3, 3, 8]), torch.tensor([0, 2, 2, 0, 1])
ROWS = torch.ones(8, WIDTH), OFFSETS
EVENTS = torch.ones(5, WIDTH), torch.tensor([0, 1, 3, 5])
META = jm.Jagged(*(x.to("meta") for x in EVENTS))
Q = torch.ones(8, 2, 4)
PAGES = jm.Pages.of([[0], [], [2]], [3, 0, 5], 128)
STORAGE = torch.ones(512, 2, 4)
TIMES = torch.arange(8)


class Names:
    """As an array of names: comparing it gives a result for each, which is true."""

    __hash__ = None

    def __eq__(self, other):
        return [True]


NAMES = Names()
TARGET, GDPA = jm.JaggedTargetAttention(WIDTH, 2), jm.JaggedGDPA(WIDTH, 2)
HSTU = jm.HSTULayer(WIDTH, 2, jm.HSTUConfig(scaling_seqlen=9))
STACK = jm.HSTUStack(WIDTH, 2, 1, jm.HSTUConfig(scaling_seqlen=9, relative_time=4)).eval()
COMPRESS = jm.LinearCompressEmbedding(3, 4, candidate_features=["a", "b", "c"])
INDEX = jm.CandidateIndex.from_map(USERS, 3)
CACHE = STACK.cache(ROWS, TIMES)


def attention(**options):
    return lambda: F.jagged_attention(Q, Q, Q, OFFSETS, **options)


def in_pages(k=STORAGE, v=STORAGE, offsets=OFFSETS, pages=PAGES):
    return lambda: F.jagged_attention(Q, k, v, OFFSETS, offsets, pages=pages)


def of_users(method, users, page_rows=16, events=EVENTS):
    cache = jm.PagedHistoryCache(STACK, 2**22, page_rows)
    cache.put(["a", "b", "c"], ROWS, timestamps=TIMES)
    return lambda: getattr(cache, method)(
        users, *([events] if method == "append" else []), **(TIMED if method == "append" else {})
    )


TIMED = dict(timestamps=torch.arange(5))


def schedule(**options):
    return lambda: jm.zigzag_schedule(
        **(dict(q_lengths=[3], kv_lengths=[3], num_heads=2, block_m=64, block_n=64) | options)
    )


def keyed(values):
    return lambda: COMPRESS(
        pytest.importorskip("torchrec").KeyedTensor(["a", "b", "c"], [6, 6, 6], values)
    )


MISTAKES = [
    *raising(
        ValueError,
        {
            "implementation must be one of .*, got <": attention(implementation=NAMES),
            "activation must be None or one of .*, got <": lambda: F.jagged_linear(
                ROWS[0], ROWS[0], activation=NAMES
            ),
            "activation must be one of .*, got <": lambda: jm.JaggedGDPA(WIDTH, 2, NAMES),
            'rotary must be "qk", "qkv" or None, got <': lambda: jm.BlockDiagonalSelfAttention(
                WIDTH, 2, rotary=NAMES
            ),
            'rotate must be "qk" or "qkv", got <': lambda: jm.Rotary.from_frequencies(8, 4, NAMES),
            "scale must be finite, got 10000": attention(scale=10**400),
            "output_scale must be finite, got inf": attention(
                activation="silu", output_scale=float("inf")
            ),
            "scale must be finite, got inf": lambda: F.block_diagonal_attention(
                Q, Q, Q, OFFSETS, scale=float("inf")
            ),
            "eps must be finite and at least 0, got inf": lambda: F.jagged_layer_norm(
                ROWS[0], eps=float("inf")
            ),
            "cache_rows must be 0 to 7, the rows of history, got values -1 to -1": lambda: (
                HSTU.cache(ROWS, torch.tensor([-1]))
            ),
            "values must keep the number of rows, 8, got a scalar": lambda: jm.Jagged(
                *ROWS
            ).with_values(torch.tensor(1.0)),
            r"x must have a row for each of the 5 candidates, got shape \[6, 2\]": lambda: (
                INDEX.ungrouped(torch.ones(6, 2))
            ),
            # more rows than candidates would be lost
            r"x must have a row for each of the 5 candidates, got shape \[7, 2\]": lambda: (
                INDEX.grouped(torch.ones(7, 2))
            ),
            "num_keys must be at least 0, got -1": lambda: jm.AttentionMask().keep(3, -1),
            "padding_value must be a real number for values of torch.float32, got 1j": lambda: (
                F.jagged_to_padded(*ROWS, 5, 1j)
            ),
            r"max_attn_len must be at most 2\^30, got 1099511627776": lambda: jm.AttentionMask(
                max_attn_len=2**40
            ),
            r"target_group_size must be at most 2\^30, got 2147483648": lambda: jm.HSTUConfig(
                target_group_size=2**31
            ),
            "users must be one per segment of events, 3, got 2": of_users("append", ["a", "b"]),
            "offsets must be on a device with values, .*got meta": of_users(
                "append", ["a", "b", "c"], 128, META
            ),
            "kv_offsets must be on q's device, cpu, or the host, got meta": in_pages(
                offsets=OFFSETS.to("meta")
            ),
            "page_rows must be at least 1 .*, got 0": lambda: jm.Pages.of([[0]], [3], 0),
            r"candidate_embeddings' values must have shape \[B, 18\], .*, got \[18\]": keyed(
                torch.ones(18)
            ),
            "num_other_heads must be at least 1, got 0": schedule(num_other_heads=0, head_dim=8),
            "q_lengths must be a dense tensor, got torch.sparse_coo": schedule(
                q_lengths=torch.tensor([3]).to_sparse()
            ),
            r"kv_lengths must be below 2\^31, got 1099511627776": schedule(kv_lengths=[2**40]),
        },
    ),
    *raising(
        TypeError,
        {
            "cache must be a Jagged of keys and values, got NoneType": lambda: HSTU.append(
                ROWS, None
            ),
            "x must be a torch.Tensor, got list": lambda: INDEX.ungrouped([1, 2]),
            "x must be a torch.Tensor, got tuple": lambda: INDEX.grouped((1, 2)),
            "rows_per_candidate must be an int, got float": lambda: INDEX.query_offsets(2.5),
            "num_queries must be an int, got float": lambda: jm.AttentionMask().keep(2.5, 3),
            "total_first must be an int, got Tensor": lambda: F.jagged_split(
                ROWS[0], OFFSETS, 0, USERS
            ),
            "max_seqlen must be an int, got str": lambda: F.jagged_linear(
                ROWS[0], ROWS[0], max_seqlen="x"
            ),
            "new's timestamps must be a torch.Tensor, got list": lambda: CACHE.append(
                jm.HistoryCache(CACHE.layers, [1] * 8)
            ),
            "new's timestamps must be int64, got torch.float32": lambda: CACHE.append(
                jm.HistoryCache(CACHE.layers, TIMES.float())
            ),
            "cache's max_rows must be an int, got str": lambda: jm.HistoryCache(
                CACHE.layers, TIMES, "x"
            ).select([0]),
            "events must be a JaggedTensor, .*, got int": of_users(
                "append", ["a", "b", "c"], 128, 3
            ),
            "users must be hashable, got a list": of_users("select", ["a", []]),
            "users must be hashable, got a dict": of_users("missing", ["a", {}]),
            "users must be an iterable of keys, got NoneType": of_users("evict", None),
            "pages.num_rows must be an int, got NoneType": in_pages(
                pages=jm.Pages(PAGES.table, 128, None)
            ),
            "pages must have an entry for each segment, got NoneType": lambda: jm.Pages.of(
                None, [3], 128
            ),
            "pages must be sequences of ints, got 3": lambda: jm.Pages.of([3], [3], 128),
            "pages must be sequences of ints: 'float' object": lambda: jm.Pages.of(
                [[0.5]], [3], 128
            ),
            "lengths must be ints, got 3.0": lambda: jm.Pages.of([[0]], [3.0], 128),
            "user_features must be a sequence of one entry .*, got int": lambda: (
                jm.LinearCompressEmbedding(3, 4, [2, 7], user_features=3)
            ),
            "indices must be a tensor or a sequence .*, got dict": lambda: F.linear_compress(
                torch.ones(4, 3), torch.ones(5, 3, 6), {}
            ),
            "block_m must be an int, got bool": schedule(block_m=True),
            "key_tiles must be a bool, got int": schedule(key_tiles=1),
        },
    ),
    # names, as arrays
    (attention(activation=NAMES), ValueError, "activation must be one of .*, got <"),
    (lambda: jm.JaggedMLP([4, 4], NAMES), ValueError, "activation must be one of .*, got <"),
    # numbers that are not finite
    (attention(scale=float("nan")), ValueError, "scale must be finite, got nan"),
    (lambda: jm.GDPAConfig(scale=float("inf")), ValueError, "scale must be finite, got inf"),
    # flags
    (lambda: HSTU.cache(ROWS, update="no"), TypeError, "update must be a bool, got str"),
    (
        lambda: jm.JaggedDINAttention(WIDTH, activation="dice", affine="no"),
        TypeError,
        "affine must be a bool, got str",
    ),
    # rows and indices
    (
        lambda: HSTU.cache(ROWS, torch.tensor([0, 8])),
        ValueError,
        "cache_rows must be 0 to 7, the rows of history, got values 0 to 8",
    ),
    # sums of positions and these lengths must fit int32
    (
        lambda: jm.AttentionMask(window=(None, 2**31 - 1)),
        ValueError,
        r"window's right must be at most 2\^30, got 2147483647",
    ),
    # timestamps and caches
    (
        lambda: STACK(ROWS, timestamps=TIMES.to_sparse()),
        ValueError,
        "timestamps must be a dense tensor, got torch.sparse_coo",
    ),
    (of_users("__contains__", []), TypeError, "users must be hashable, got a list"),
    # pages
    (in_pages(v=STORAGE[:128]), ValueError, "v must have k's rows, 512, got 128"),
    # linear compression
    (
        keyed(torch.ones(5, 17)),
        ValueError,
        r"candidate_embeddings' values must have shape \[B, 18\], .*, got \[5, 17\]",
    ),
    # schedules
    (schedule(head_dim="x"), TypeError, "head_dim must be an int, got str"),
]


@pytest.mark.parametrize(
    "call,kind,message", MISTAKES, ids=[message[:40] for _, _, message in MISTAKES]
)
def test_a_mistake_is_an_error_in_the_callers_words(call, kind, message):
    with pytest.raises(kind, match=f"^{message}"):
        call()


@pytest.mark.parametrize("call,name", [
    (lambda x: TARGET(x, ROWS), "targets"),
    (lambda x: TARGET.append(x, TARGET.cache(ROWS)), "events"),
    (lambda x: STACK.score(x, CACHE, timestamps=torch.arange(5)), "targets"),
])  # fmt: skip
@pytest.mark.parametrize(
    "values,offsets",
    [
        (EVENTS[0], EVENTS[1].float()),
        (EVENTS[0][:, :0], EVENTS[1]),
        (EVENTS[0].double(), EVENTS[1]),
    ],
)
def test_a_plural_has_the_possessive_of_plurals(call, name, values, offsets):
    with pytest.raises((TypeError, ValueError)) as error:
        call((values, offsets))
    assert not re.search(r"s's\b", str(error.value))
    assert name in str(error.value)


def test_pages_of_any_sequences_are_taken():
    expected = jm.Pages.of([[1, 0], [2]], [200, 5], 128).table
    assert torch.equal(
        jm.Pages.of(iter([array("q", [1, 0]), range(2, 3)]), (200, 5), 128).table, expected
    )
    assert not jm.Pages.of([], [], 128).table.numel()
