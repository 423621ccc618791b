"""AttentionMask: every small mask against the written rule, as loops over rows and columns."""

import copy
import dataclasses
import itertools

import pytest
import torch
from jagged_kernels.attention.params import MaskParams
from marks import diagonal_first, slow_after

import jagged_modules as jm
from jagged_modules.masks import AttentionMask

SIZES = [(n, t) for n in range(8) for t in range(n + 1)]  # columns, targets
WINDOWS = [None, (0, 0), (2, None), (None, 1), (1, 3)]
LIMITS = [(0, 0), *itertools.product([1, 2, 4], [0, 1, 3])]  # max_attn_len, min_full_attn_seqlen


def seen(mask: AttentionMask, i: int, j: int, n: int, t: int) -> bool:
    """Whether row i sees column j, of n columns the last t of which are targets."""
    c = mask.contextual_seqlen
    M = n - t - c + 1 if c else n - t

    def identity(x):
        return min(max(x - c + 1, 0) if c else x, M)

    first_target, group = n - t, mask.target_group_size
    if mask.causal:
        keep = i == j or identity(i) > identity(j)
        distance = identity(i) - identity(j)
    else:
        keep = i == j or j < first_target
        distance = abs(identity(i) - identity(j))
    if mask.max_attn_len:
        exempt = mask.min_full_attn_seqlen > 0 and identity(i) >= M - mask.min_full_attn_seqlen
        keep = keep and (distance <= mask.max_attn_len or exempt)
    if c:
        keep = keep or (identity(i) == 0 and identity(j) < M)
    if first_target <= j <= i and (i - first_target) // group == (j - first_target) // group:
        keep = True
    if mask.window is not None:
        left, right = mask.window
        keep = keep and (left is None or i - j <= left) and (right is None or -right <= i - j)
    if mask.recent_history and i != j and j < first_target - mask.recent_history:
        keep = False
    if j < mask.global_prefix and j < first_target and (j <= i or not mask.causal):
        keep = True
    return keep


def intervals(row: list[bool]) -> int:
    return sum(now and not before for before, now in zip([False, *row], row))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("limits", LIMITS, ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_every_small_mask_equals_the_written_rule(causal, limits, window):
    for group, c in itertools.product([1, 2, 3], [0, 1, 2, 3]):
        mask = AttentionMask(causal, window, None, group, c, *limits)
        for n, t in SIZES:
            keep = mask.keep(n, n, t).tolist()
            assert keep == [[seen(mask, i, j, n, t) for j in range(n)] for i in range(n)], (
                mask,
                n,
                t,
            )
            assert all(intervals(row) <= 2 for row in keep), (mask, n, t)
            assert all(row[i] for i, row in enumerate(keep)), "a row sees its own column"


@pytest.mark.parametrize("causal", [True, False])
@slow_after(
    len(WINDOWS),
    "window, limits",
    diagonal_first([(x,) for x in WINDOWS], [((0, 0),), ((1, 0),), ((2, 3),)]),
    ids=str,
)
def test_every_small_mask_with_a_prefix_or_a_truncated_history_equals_the_written_rule(
    causal, window, limits
):
    for group, c, prefix, recent in itertools.product([1, 2], [0, 2], [0, 1, 3], [0, 1, 2, 4]):
        mask = AttentionMask(
            causal, window, None, group, c, *limits, global_prefix=prefix, recent_history=recent
        )
        for n, t in SIZES:
            keep = mask.keep(n, n, t).tolist()
            assert keep == [[seen(mask, i, j, n, t) for j in range(n)] for i in range(n)], (
                mask,
                n,
                t,
            )
            assert all(intervals(row) <= 3 for row in keep), (mask, n, t)
            assert all(row[i] for i, row in enumerate(keep)), "a row sees its own column"


SOME = [
    AttentionMask(True),
    AttentionMask(window=(1, 0)),
    AttentionMask(True, None, None, 2, 2, 1, 1),
    AttentionMask(window=(1, 0), global_prefix=2, recent_history=2),
    AttentionMask(True, global_prefix=9),
]


@pytest.mark.parametrize("num_queries", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("mask", SOME, ids=repr)
def test_queries_are_aligned_with_the_end_of_the_keys(mask, num_queries):
    """With more queries than keys, rows before the first column follow the same rule."""
    n, t = 5, 2
    expected = [
        [seen(mask, i + n - num_queries, j, n, t) for j in range(n)] for i in range(num_queries)
    ]
    assert mask.keep(num_queries, n, t).tolist() == expected
    if num_queries <= n:
        assert (
            mask.keep(num_queries, n, t).tolist() == mask.keep(n, n, t)[n - num_queries :].tolist()
        )


def test_rows_by_position():
    mask = AttentionMask(True, (4, None), None, 2, 2, 3, 1)
    rows = torch.tensor([8, 0, 3])
    assert torch.equal(mask.rule(rows, 9, 2), mask.keep(9, 9, 2)[rows])


def test_targets_see_all_history_and_no_other_target():
    picture = """\
# . . . . .
# # . . . .
# # # . . .
# # # # . .
# # # . # .
# # # . . #"""
    mask = jm.AttentionMask(causal=True, num_targets=torch.tensor([0, 3]))
    assert mask.picture(6, segment=1) == picture
    assert mask.picture(6, segment=1, num_queries=2) == "\n".join(picture.splitlines()[-2:])
    assert mask.picture(2) == "# .\n# #"
    assert mask.picture(0) == ""


def test_context_groups_and_a_limited_reach():
    mask = jm.AttentionMask(
        True,
        None,
        torch.tensor([4]),
        target_group_size=2,
        contextual_seqlen=2,
        max_attn_len=2,
        min_full_attn_seqlen=1,
    )
    picture = """\
# # # # # # . . . .
# # # # # # . . . .
# # # . . . . . . .
# # # # . . . . . .
. . # # # . . . . .
# # # # # # . . . .
# # # # # # # . . .
# # # # # # # # . .
# # # # # # . . # .
# # # # # # . . # #"""
    assert mask.picture(10) == picture


def test_semi_local_attention_of_a_truncated_history():
    """The prefix of 2 columns is seen by all later rows; the window of 3 columns back, only within
    the last 5 of the history."""
    mask = jm.AttentionMask(True, (3, None), torch.tensor([2]), global_prefix=2, recent_history=5)
    picture = """\
# . . . . . . . . .
# # . . . . . . . .
# # # . . . . . . .
# # . # . . . . . .
# # . # # . . . . .
# # . # # # . . . .
# # . # # # # . . .
# # . . # # # # . .
# # . . . # # # # .
# # . . . . # # . #"""
    assert mask.picture(10) == picture


@pytest.mark.parametrize("mask, expected", [
    (AttentionMask(), True),
    (AttentionMask(global_prefix=3), True),
    (AttentionMask(recent_history=3), False),
    (AttentionMask(window=(None, 3), global_prefix=20), False),
    (AttentionMask(window=(None, None)), True),
    (AttentionMask(target_group_size=3, contextual_seqlen=2), True),
    (AttentionMask(causal=True), False),
    (AttentionMask(window=(None, 4)), False),
    (AttentionMask(max_attn_len=4), False),
    (AttentionMask(num_targets=torch.tensor([0])), False),
])  # fmt: skip
def test_hides_nothing(mask, expected):
    assert mask.hides_nothing() == expected
    assert not expected or mask.keep(9, 9).all()


@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_a_masks_params_make_the_same_mask(window):
    num_targets = torch.tensor([1, 2])
    mask = AttentionMask(True, window, num_targets, 2, 3, 4, 5, 2, 6)
    again = AttentionMask.from_params(mask.params, num_targets)
    assert again.params == mask.params and again.num_targets is num_targets
    assert torch.equal(again.keep(9, 9, 2), mask.keep(9, 9, 2))
    assert all(type(x) is int for x in mask.params)


def test_masks_do_not_change():
    mask = AttentionMask(causal=True, window=[3, 0])
    with pytest.raises(dataclasses.FrozenInstanceError):
        mask.causal = False
    expected = MaskParams(
        causal=1,
        left=3,
        right=0,
        has_targets=0,
        group_size=1,
        context=0,
        max_attn_len=0,
        full_attn_len=0,
    )
    assert expected[-2:] == (0, 0)
    assert copy.deepcopy(mask).params == mask.params == expected


def test_repr_has_the_fields_that_were_given():
    assert repr(AttentionMask()) == "AttentionMask()"
    mask = AttentionMask(True, (None, 2), torch.tensor([1, 2], device="meta"), max_attn_len=4)
    assert (
        repr(mask)
        == "AttentionMask(causal=True, window=(None, 2), max_attn_len=4, num_targets=Tensor[2])"
    )
    assert (
        repr(AttentionMask(global_prefix=3, recent_history=4))
        == "AttentionMask(global_prefix=3, recent_history=4)"
    )


BAD = [
    (dict(causal=1), TypeError, "causal must be a bool, got int"),
    (dict(window=3), TypeError, r"window must be a pair \(left, right\) or None, got 3"),
    (
        dict(window=(1, 2, 3)),
        TypeError,
        r"window must be a pair \(left, right\) or None, got \(1, 2, 3\)",
    ),
    (dict(window=(1.5, 2)), TypeError, "window's left must be an int, got float"),
    (dict(window=(1, -2)), ValueError, "window's right must be at least 0, got -2"),
    (dict(num_targets=3), TypeError, "num_targets must be a torch.Tensor, got int"),
    (
        dict(num_targets=torch.ones(2)),
        TypeError,
        "num_targets must be int32 or int64, got torch.float32",
    ),
    (
        dict(num_targets=torch.ones(2, 1, dtype=torch.int32)),
        ValueError,
        r"num_targets must be 1-D, got shape \[2, 1\]",
    ),
    (
        dict(num_targets=torch.tensor([1, -3])),
        ValueError,
        "num_targets must not be negative, got -3",
    ),
    (dict(target_group_size=0), ValueError, "target_group_size must be at least 1, got 0"),
    (dict(target_group_size=True), TypeError, "target_group_size must be an int, got bool"),
    (dict(contextual_seqlen=-1), ValueError, "contextual_seqlen must be at least 0, got -1"),
    (dict(max_attn_len="8"), TypeError, "max_attn_len must be an int, got str"),
    (dict(max_attn_len=-8), ValueError, "max_attn_len must be at least 0, got -8"),
    (
        dict(max_attn_len=1, min_full_attn_seqlen=-1),
        ValueError,
        "min_full_attn_seqlen must be at least 0, got -1",
    ),
    (dict(global_prefix=-1), ValueError, "global_prefix must be at least 0, got -1"),
    (dict(global_prefix=None), TypeError, "global_prefix must be an int, got NoneType"),
    (dict(recent_history=-2), ValueError, "recent_history must be at least 0, got -2"),
    (dict(recent_history=True), TypeError, "recent_history must be an int, got bool"),
]


@pytest.mark.parametrize("fields, error, message", BAD, ids=[message[:40] for _, _, message in BAD])
def test_bad_fields(fields, error, message):
    with pytest.raises(error, match=message):
        AttentionMask(**fields)


def test_bad_picture():
    mask = AttentionMask(num_targets=torch.tensor([1, 0]))
    for segment, error in ((2, ValueError), (-1, ValueError), (0.5, TypeError)):
        with pytest.raises(error, match="segment must be "):
            mask.picture(3, segment)
    with pytest.raises(ValueError, match="num_queries must be at least 0, got -1"):
        mask.picture(3, num_queries=-1)
    with pytest.raises(ValueError, match="length must be at least 0, got -1"):
        AttentionMask().picture(-1)


def test_another_rule_is_refused():
    with pytest.raises(
        TypeError,
        match="^AttentionMask must not be subclassed: kernels read its fields, not its rule$",
    ):
        type("Dilated", (AttentionMask,), {"rule": lambda *_: None})
