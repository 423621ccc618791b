"""Layers on meta tensors give the shapes and dtypes they give on the CPU; arguments on different
devices are errors that name them."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

import jagged_modules as jm
from jagged_modules import functional as F

from ..compatibility.cases import CASES, SIZES, training_step

WIDTH, HEADS = 32, 2
OFFSETS = torch.tensor([0, 2, 5])


def rand(device: str, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=device)


def offsets(device: str, *lengths: int) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device)


def jagged(device: str) -> jm.Jagged:
    return jm.Jagged(rand(device, 5, WIDTH), OFFSETS.to(device), max_seqlen=4)


def from_counts(device: str) -> jm.CandidateIndex:
    return jm.CandidateIndex.from_counts(torch.tensor([1, 2], device=device))


def from_map(device: str) -> jm.CandidateIndex:
    return jm.CandidateIndex.from_map(torch.tensor([1, 0, 1], device=device), 2)


def score(device: str):
    stack = jm.HSTUStack(WIDTH, HEADS, 2, device=device)
    return stack.score(jagged(device), stack.cache(jagged(device)))


def target_attention(device: str, targets, history, *candidates):
    return jm.JaggedTargetAttention(WIDTH, HEADS, device=device)(targets, history, *candidates)


def gdpa(device: str, **options):
    return jm.JaggedGDPA(WIDTH, HEADS, device=device, **options)


LAYERS = {
    "target-dense": lambda d: target_attention(d, rand(d, 2, 3, WIDTH), jagged(d)),
    "target-jagged": lambda d: target_attention(
        d, jagged(d), (rand(d, 7, WIDTH), offsets(d, 3, 4))
    ),
    "target-counts": lambda d: target_attention(d, rand(d, 3, 1, WIDTH), jagged(d), from_counts(d)),
    "target-map": lambda d: target_attention(d, rand(d, 3, 1, WIDTH), jagged(d), from_map(d)),
    "target-host-index": lambda d: target_attention(
        d, rand(d, 3, 1, WIDTH), jagged(d), from_map("cpu")
    ),
    "gdpa": lambda d: gdpa(d)(jagged(d)),
    "gdpa-mask": lambda d: gdpa(d, mask=jm.AttentionMask(causal=True))(
        jagged(d), num_targets=torch.tensor([1, 1], device=d)
    ),
    "gdpa-seeds": lambda d: gdpa(d, config=jm.GDPAConfig(num_seeds=2))(jagged(d)),
    "gdpa-weights": lambda d: gdpa(d, config=jm.GDPAConfig(num_weights=2, qk_norm=True))(jagged(d)),
    "gdpa-block": lambda d: jm.GDPABlock(WIDTH, HEADS, device=d)(jagged(d), jagged(d)),
    "block": lambda d: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, device=d)(jagged(d)),
    "block-plain": lambda d: jm.BlockDiagonalSelfAttention(WIDTH, HEADS, 16, None, device=d)(
        jagged(d)
    ),
    "hstu": lambda d: jm.HSTUStack(WIDTH, HEADS, 2, device=d)(
        jagged(d), num_targets=torch.tensor([1, 1], device=d)
    ),
    "hstu-score": score,
    "mlp": lambda d: jm.JaggedMLP([WIDTH, 8], device=d)(jagged(d)),
    "compress": lambda d: jm.LinearCompressEmbedding(4, 3, 5, device=d)(
        rand(d, 3, 4, 8), rand(d, 2, 5, 8), from_counts(d)
    ),
    "index": lambda d: from_map(d).candidate_to_user,
    "concat-host-offsets": lambda d: F.jagged_concat(
        [rand(d, 5, 4), rand(d, 2, 4)], [OFFSETS, offsets(d, 1, 1)]
    )[0],
}


@pytest.mark.parametrize("layer", LAYERS)
def test_shapes_and_dtypes(layer):
    on_host, on_meta = (LAYERS[layer](device) for device in ("cpu", "meta"))
    if isinstance(on_host, jm.Jagged):
        assert (
            torch.Size([on_host.num_segments]) == on_meta.offsets.diff().shape
            and on_meta.offsets.device.type == "meta"
        )
        on_host, on_meta = on_host.values, on_meta.values
    assert on_meta.device.type == "meta"
    assert (on_meta.shape, on_meta.dtype) == (on_host.shape, on_host.dtype)


@pytest.mark.parametrize("name", CASES)
def test_fake_tensors_give_the_shapes_and_dtypes_of_a_step(name):
    """As where memory is planned: no layer reads the values of a fake tensor."""
    case = CASES[name]
    inputs = case.model.inputs(*SIZES[0])
    expected = training_step(case.model(case.build()), inputs)
    with FakeTensorMode() as mode:
        step = training_step(case.model(case.build()), [mode.from_tensor(x) for x in inputs])
    assert [(x.shape, x.dtype) for x in step] == [(x.shape, x.dtype) for x in expected]


def block_attend(rotary):
    return F.block_diagonal_attention_packed(rand("cpu", 5, 3, 2, 8), OFFSETS, rotary=rotary)


def self_target(offsets=OFFSETS, candidate_offsets=OFFSETS, k=None):
    q = rand("cpu", 5, 2, 8)
    k = q if k is None else k
    return F.self_target_attention(q, q, k, k, offsets, candidate_offsets)


def target(candidates, **options):
    history = rand("cpu", 5, 2, 8)
    return F.target_attention(
        rand("cpu", 3, 2, 2, 8), history, history, candidates, OFFSETS, **options
    )


META, X = OFFSETS.to("meta"), torch.randn(5, 4)
HOST_OR = "cpu, or the host, got meta"
ERRORS = {
    f"candidates must be on q's device, {HOST_OR}": lambda: target(from_counts("meta")),
    f"candidates must be on q's device, {HOST_OR}.": lambda: target(from_map("meta")),
    "candidates must have segments of at most max_seqlen_q = 3 rows, got 4": lambda: target(
        from_counts("cpu"), max_seqlen_q=3
    ),
    f"offsets must be on q_user's device, {HOST_OR}": lambda: self_target(META),
    f"candidate_offsets must be on q_user's device, {HOST_OR}": lambda: self_target(
        candidate_offsets=META
    ),
    "k must be on q_user's device, cpu, got meta": lambda: self_target(k=rand("meta", 5, 2, 8)),
    "k must have q_user's dtype, torch.float32, got torch.float64": lambda: self_target(
        k=rand("cpu", 5, 2, 8).double()
    ),
    "q_user's heads must be a multiple of k's, got 2 and 3": lambda: self_target(
        k=rand("cpu", 5, 3, 8)
    ),
    "k must have q_user's rows, 5, got 4": lambda: self_target(k=rand("cpu", 4, 2, 8)),
    f"offsets must be on qkv's device, {HOST_OR}": lambda: F.block_diagonal_attention_packed(
        rand("cpu", 5, 3, 2, 8), META
    ),
    "qkv's head dim must be 1 to 256, got 257": lambda: F.block_diagonal_attention_packed(
        rand("cpu", 5, 3, 2, 257), OFFSETS
    ),
    f"rotary's cos must be on the queries' device, {HOST_OR}": lambda: block_attend(
        jm.Rotary.from_frequencies(8, 10, device="meta")
    ),
    "cos must be on x's device, cpu, got meta": lambda: F.apply_rotary(
        rand("cpu", 5, 2, 8), rand("meta", 5, 4), rand("cpu", 5, 4)
    ),
    f"indices must be on the embeddings' device, {HOST_OR}": lambda: F.linear_compress(
        (rand("cpu", 3, 4), rand("cpu", 3, 5)),
        (rand("cpu", 2, 4, 8), rand("cpu", 3, 5, 8)),
        from_counts("meta"),
    ),
    f"offsets must be on x's device, {HOST_OR}": lambda: F.jagged_linear(
        X, rand("cpu", 3, 4), None, META
    ),
    f"plan must be on x's device, {HOST_OR}": lambda: F.jagged_jagged_bmm_jagged_out(
        X, X, F.ScorePlan.from_offsets(OFFSETS).to("meta")
    ),
    f"plan must be on p's device, {HOST_OR}": lambda: F.jagged2_softmax(
        torch.ones(13), F.ScorePlan.from_offsets(OFFSETS).to("meta")
    ),
    "weight must be on x's device, cpu, got meta": lambda: F.jagged_layer_norm(X, rand("meta", 4)),
    "bias must have x's dtype, torch.float32, got torch.float64": lambda: F.jagged_layer_norm(
        X, None, rand("cpu", 4).double()
    ),
    f"offsets[1] must be on values[1]'s device, {HOST_OR}": lambda: F.jagged_concat(
        [X, X], [OFFSETS, META]
    ),
    f"offsets must be on dense's device, {HOST_OR}": lambda: F.padded_to_jagged(
        rand("cpu", 2, 3, 4), META, 5
    ),
    "implementation='reference' needs tensors with data, got meta": lambda: F.jagged_softmax(
        X.to("meta"), META, implementation="reference"
    ),
    "candidate_to_user is unknown for a sorted index on meta: call users": lambda: (
        from_counts("meta").candidate_to_user
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_callers_argument(message):
    with pytest.raises(ValueError, match="^" + re.escape(message.rstrip("."))):
        ERRORS[message]()
