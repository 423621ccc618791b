"""The operators as functions: check the arguments, choose the implementation by device, call it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .activations import ACTIVATIONS
from .autocast import autocast, autocast_dtype
from .blocks import block_offsets, positions_in_segments
from .broadcast import CandidateIndex
from .checks import IMPLEMENTATIONS, check_integers, check_offsets, check_size, check_tensor, values_are_checkable
from .cpu import attention_cpu
from .decomposed import linear_compress_decomposed
from .jagged_ops import (
    ScorePlan,
    array_jagged_bmm_jagged_out,
    jagged2_softmax,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
    jagged_layer_norm,
    jagged_linear,
    jagged_softmax,
)
from .jagged_rows import jagged_concat, jagged_dense_add, jagged_dense_mul, jagged_split, jagged_to_padded, padded_to_jagged
from .masks import AttentionMask
from .reference import attention_reference, linear_compress_reference
from .rotary import Rotary, apply_rotary, check_rotary, kernel_arguments
from .schedule import TileSchedule, attention_tile, device_schedule

BLOCK_IMPLEMENTATIONS = (*IMPLEMENTATIONS, "hopper")
COMPRESS_IMPLEMENTATIONS = ("auto", "reference", "decomposed", "padded", "fused", "hopper")
MAX_HEAD_DIM = 256
BLOCKS = (16, 32, 64, 128)
__all__ = [
    "ScorePlan",
    "apply_rotary",
    "array_jagged_bmm_jagged_out",
    "block_diagonal_attention",
    "jagged2_softmax",
    "jagged_attention",
    "jagged_concat",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_layer_norm",
    "jagged_linear",
    "jagged_softmax",
    "jagged_split",
    "jagged_to_padded",
    "linear_compress",
    "padded_to_jagged",
    "target_attention",
]
for _name in __all__[1:]:
    torch.fx.wrap(_name)  # by name: those defined elsewhere are called through this module, too


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_offsets: Tensor | str,
    kv_offsets: Tensor | str | None = None,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    output_scale: float | Tensor = 1,  # an int: torch.compile makes a symbol of a float default
    mask: AttentionMask | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Attention within the segments of jagged tensors: activation(scale · q kᵀ) · output_scale · v for every segment and head.

    Gradients flow to q, k, v and a tensor output_scale. A query row that sees no key gives 0. Nothing is padded; an operand "shared" by
    all segments is not replicated; key blocks that the mask hides from a whole tile of queries are not visited.

    Args:
        q: `[Lq, H, D]` fp32, fp16 or bf16 (on the CPU also fp64). Any row and head stride: views of a packed projection are read in place.
        k: `[Lk, Hkv, D]`, v: `[Lk, Hkv, Dv]`, same dtype. H is a multiple of Hkv; query head h reads key head h // (H / Hkv).
            D and Dv: 1 to 256.
        q_offsets: `[B + 1]` int32 or int64, or "shared": every segment takes all rows of q `[S, H, D]`.
        kv_offsets: `[B + 1]`, None for self-attention (q_offsets), or "shared": every segment takes all rows of k and v.
            Offsets may be host tensors.
        max_seqlen_q, max_seqlen_kv: the longest segments. Host offsets are checked against them; they never truncate.
        activation: "softmax", or a function of each score by itself: "identity", "relu", "relu_squared", "leaky_relu" (0.01), "silu",
            "gelu", "gelu_tanh", "gelu_taylor" (within 4e-3 of GELU, no special-function unit), "hardswish", "sigmoid".
        scale: factor of q kᵀ before the activation; 1/sqrt(D) by default.
        output_scale: factor after the activation, a number or `[B]`; 1 with softmax. HSTU's 1/N is one. torch.compile compiles anew for
            another number, not for other values of a tensor.
        mask: what each query row sees; everything if None. Not with shared keys.
        schedule: tile schedule of these lengths, from `Jagged.schedule` or `zigzag_schedule`. None: built from the offsets, on the
            device without a sync if they are there. Triton only; the other implementations need none.
        implementation: "auto" (triton on CUDA, segments of equal lengths together on the CPU), "reference" or "triton".

    Returns:
        `[Lq, H, Dv]`; `[B · S, H, Dv]` for shared q.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: shapes, dtypes, devices, heads, offsets, names or a schedule that do
        not fit together. RuntimeError: a second derivative, or a torch.func transform (vmap, grad, jvp); the reference has both.
    """
    kv_offsets = q_offsets if kv_offsets is None else kv_offsets
    q_shared, kv_shared = isinstance(q_offsets, str), isinstance(kv_offsets, str)
    check_tensor("q", q, 3, "[Lq, H, D]")
    check_tensor("k", k, 3, "[Lk, Hkv, D]")
    check_tensor("v", v, 3, "[Lk, Hkv, Dv]")
    q, k, v = (autocast(x) for x in (q, k, v))
    _check_attention(q, k, v, q_offsets, kv_offsets, scale, activation, output_scale, mask, schedule, implementation)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)

    if q_shared:
        check_offsets("kv_offsets", kv_offsets, k.shape[0], max_seqlen_kv)
        q_offsets = torch.arange(kv_offsets.shape[0], dtype=kv_offsets.dtype, device=kv_offsets.device) * q.shape[0]
    else:
        check_offsets("q_offsets", q_offsets, q.shape[0], max_seqlen_q)
        if not kv_shared and (kv_offsets is not q_offsets or max_seqlen_kv is not None):
            check_offsets("kv_offsets", kv_offsets, k.shape[0], max_seqlen_kv)
        if not kv_shared and q_offsets.shape != kv_offsets.shape:
            q_segments, kv_segments = q_offsets.shape[0] - 1, kv_offsets.shape[0] - 1
            raise ValueError(f"q_offsets and kv_offsets must describe the same number of segments, got {q_segments} and {kv_segments}")
    _check_per_segment(q, q_offsets, kv_offsets, output_scale, mask)
    if mask is not None and mask.hides_nothing():
        mask = None

    row_scale = None
    if isinstance(output_scale, Tensor) and (kv_shared or output_scale.requires_grad and implementation != "reference"):
        # The kernels scale the rows of a segment alike, and give no gradient for the factor.
        rows = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
        lengths = q_offsets.diff().to(q.device, non_blocking=True)
        row_scale, output_scale = torch.repeat_interleave(output_scale.to(q.device), lengths, output_size=rows), 1.0
    if kv_shared:
        # No query row meets another, so keys shared by all segments make one segment of all query rows.
        ends = torch.arange(2, dtype=q_offsets.dtype, device=q_offsets.device)
        q_offsets, kv_offsets = ends * q.shape[0], ends * k.shape[0]

    if implementation == "reference":
        flags = dict(scale=scale, q_shared=q_shared, activation=activation, mask=mask, output_scale=output_scale)
        out = attention_reference(q, k, v, q_offsets, kv_offsets, **flags)
    elif torch._C._are_functorch_transforms_active():  # forward-mode derivatives would be silently zero
        raise RuntimeError('jagged_attention does not run under torch.func transforms (vmap, grad, jvp); implementation="reference" does')
    else:
        flags = dict(scale=scale, q_shared=q_shared, kv_shared=kv_shared, activation=activation)
        flags |= dict(mask=None if mask is None else mask.spec, num_targets=None if mask is None else mask.num_targets)
        flags |= dict(segment_scale=output_scale if isinstance(output_scale, Tensor) else None)
        flags |= dict(output_scale=1.0 if isinstance(output_scale, Tensor) else float(output_scale))
        run = _triton_attention if implementation == "triton" or q.device.type == "cuda" else _cpu_attention
        out = run(q, k, v, q_offsets, kv_offsets, schedule, **flags)
    return out if row_scale is None else (out * row_scale[:, None, None]).to(out.dtype)


def _cpu_attention(q, k, v, q_offsets, kv_offsets, schedule, *, scale, q_shared, kv_shared, **flags) -> Tensor:
    out, _ = attention_cpu(q, k, v, q_offsets, kv_offsets, scale, q_shared, *flags.values())
    return out


def _triton_attention(q, k, v, q_offsets, kv_offsets, schedule, *, scale, q_shared, kv_shared, **flags) -> Tensor:
    from jagged_kernels.attention import triton_attention

    if q.dtype == torch.float64:
        raise ValueError("q must be float32, float16 or bfloat16 for the triton implementation, got torch.float64")
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    if scale <= 0 and flags["activation"] == "softmax":  # the kernels take the row maximum before scaling
        q, scale = q * scale, 1.0
    q_offsets, kv_offsets = (x.to(q.device, non_blocking=True) for x in (q_offsets, kv_offsets))
    if flags["num_targets"] is not None:
        flags["num_targets"] = flags["num_targets"].to(q.device, non_blocking=True).contiguous()
    if flags["segment_scale"] is not None:
        flags["segment_scale"] = flags["segment_scale"].to(q.device, torch.float32, non_blocking=True).contiguous()
    head_dim, itemsize = max(q.shape[2], v.shape[2]), q.element_size()
    if schedule is None or kv_shared:
        total_q = q.shape[0] * (q_offsets.shape[0] - 1) if q_shared else q.shape[0]
        sizes = dict(num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=head_dim, itemsize=itemsize)
        schedule = device_schedule(q_offsets, kv_offsets, total_q, None, mask=flags["mask"], num_targets=flags["num_targets"], **sizes)
    schedule = schedule.to(q.device, non_blocking=True)
    _check_schedule(schedule, q_offsets)
    keys = schedule.backward
    key_schedule = (None, None, attention_tile(head_dim, itemsize).key) if keys is None else (keys.tiles, keys.num_tiles, keys.block_m)
    out, _ = triton_attention(
        q, k, v, q_offsets, kv_offsets, schedule.tiles, schedule.num_tiles, schedule.block_m, *key_schedule, scale, q_shared, kv_shared,
        *flags.values(),
    )  # fmt: skip
    return out


def target_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    candidates: CandidateIndex,
    kv_offsets: Tensor,
    *,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
    activation: str = "softmax",
    scale: float | None = None,
    output_scale: float | Tensor = 1,
    mask: AttentionMask | None = None,
    schedule: TileSchedule | None = None,
    implementation: str = "auto",
) -> Tensor:
    """Every candidate attends to its user's history; keys and values stay one copy per user, forward and backward.

    Softmax attention never mixes query rows, so a user's candidates, one after the other, are one long query segment. Candidates in
    any other order are gathered by user first and their results put back: one copy of q and one of the output, none of k or v.

    Args:
        q: `[num_candidates, n_q, H, D]`, n_q query rows per candidate.
        k: `[L, Hkv, D]`, v: `[L, Hkv, Dv]`: the users' histories. kv_offsets: `[num_users + 1]`.
        candidates: which user each candidate belongs to.
        schedule: of the grouped queries, from `Jagged.schedule(queries=candidates, rows_per_candidate=n_q, ...)`.
        mask: takes a user's query rows, candidate after candidate in the order of q, for the last rows of the history.
        Others: as in `jagged_attention`; max_seqlen_q counts the query rows of a user.

    Returns:
        `[num_candidates, n_q, H, Dv]`, in the order of q. A candidate whose user has no history gets 0.

    Raises:
        TypeError, ValueError: as `jagged_attention`; also candidates that do not fit q or kv_offsets.
    """
    check_tensor("q", q, 4, "[num_candidates, n_q, H, D]")
    if not isinstance(candidates, CandidateIndex):
        raise TypeError(f"candidates must be a CandidateIndex, got {type(candidates).__name__}")
    if kv_offsets is None:  # jagged_attention would take it for self-attention
        raise TypeError('kv_offsets must be a torch.Tensor or "shared", got NoneType')
    candidates.check(q.shape[0], num_users=kv_offsets.shape[0] - 1 if isinstance(kv_offsets, Tensor) else None)
    candidates = candidates.to(q.device)
    num_candidates, rows = q.shape[:2]
    if candidates.order is not None:
        q = q.index_select(0, candidates.order)
    out = jagged_attention(
        q.flatten(0, 1),
        k,
        v,
        candidates.query_offsets(rows),
        kv_offsets,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_kv=max_seqlen_kv,
        activation=activation,
        scale=scale,
        output_scale=output_scale,
        mask=mask,
        schedule=schedule,
        implementation=implementation,
    ).unflatten(0, (num_candidates, rows))
    return out if candidates.order is None else out.index_select(0, candidates.inverse)


def linear_compress(
    weights: Tensor | Sequence[Tensor],
    embeddings: Tensor | Sequence[Tensor],
    indices: Tensor | CandidateIndex | Sequence[Tensor | CandidateIndex] | None = None,
    *,
    implementation: str = "auto",
) -> Tensor:
    """Linear compression of embeddings that belong to the candidates and to what many candidates share (users, vendors).

        out[b] = W @ E[b]                                                        one level
        out[b] = W_user @ E_user[user_of[b]] + W_cand @ E_cand[b]                users and candidates
        out[b] = Σ_l W_l @ E_l[index_l[b]]                                       any number of levels, the candidates last

    Each level is multiplied at its own batch size and added where a candidate asks for it: no embedding is replicated, forward or
    backward. Gradients flow to every weight and embedding; those of a shared level are summed over its candidates first.

    Args:
        weights: W `[M, K]`, or one `[M, K_l]` per level, coarsest first. fp32, fp16 or bf16, on the CPU also fp64. Rows that start at
            16-byte boundaries load fastest; others are copied to such rows.
        embeddings: E `[B, K, N]`, or one `[B_l, K_l, N]` per level, the candidates' last.
        indices: for every level but the last, the row of it that each of the last level's B rows takes: `[B]` int32 or int64 in any
            order, or a `CandidateIndex`. None with one level. Rows that none asks for are legal.
        implementation: "reference" (every level replicated, one product), "decomposed" (a product per level, then gathered and
            added), "padded" (so with each K padded to a multiple of 8), "fused" (Triton: the other levels are added, in fp32 and
            with one rounding, while the candidates' product is in registers), "hopper" (the same on compute capability 9.0, all
            in one launch for up to two levels: 16 bits, N a multiple of 8, embeddings whose rows start at 16-byte boundaries), or
            "auto": hopper where it takes the operands and N > 64, else fused on CUDA, decomposed elsewhere.

    Returns:
        `[B, M, N]`.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: shapes, dtypes, devices or indices that do not fit together.
        RuntimeError: a second derivative of the fused and hopper implementations; the others have it.
    """
    weights, embeddings = ([x] if isinstance(x, Tensor) else list(x) for x in (weights, embeddings))
    indices = [] if indices is None else [indices] if isinstance(indices, (Tensor, CandidateIndex)) else list(indices)
    _check_linear_compress(weights, embeddings, indices, implementation)
    weights, embeddings = ([autocast(x) for x in tensors] for tensors in (weights, embeddings))
    rows, device = embeddings[-1].shape[0], embeddings[-1].device
    maps = [x.to(device).users(rows) if isinstance(x, CandidateIndex) else x.to(device, non_blocking=True) for x in indices]
    if implementation == "reference":
        return linear_compress_reference(weights, embeddings, maps)
    if implementation in ("decomposed", "padded") or implementation == "auto" and device.type != "cuda":
        return linear_compress_decomposed(weights, embeddings, maps, align=8 if implementation == "padded" else 1)

    from jagged_kernels.linear_compress import triton_linear_compress

    if weights[0].dtype == torch.float64:
        name = "fused" if implementation == "auto" else implementation
        raise ValueError(f"weights must be float32, float16 or bfloat16 for the {name} implementation, got torch.float64")
    grouped = [x.to(device) if isinstance(x, CandidateIndex) else None for x in indices]
    orders = [None if x is None else x.order for x in grouped]
    offsets = [None if x is None else x.offsets for x in grouped]
    return triton_linear_compress(weights, embeddings, maps, orders, offsets, implementation)


def _check_linear_compress(weights, embeddings, indices, implementation) -> None:
    if implementation not in COMPRESS_IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {COMPRESS_IMPLEMENTATIONS}, got {implementation!r}")
    if not len(weights) == len(embeddings) == len(indices) + 1:
        sizes = f"{len(weights)} weights, {len(embeddings)} embeddings and {len(indices)} indices"
        raise ValueError(f"weights and embeddings must be one per level, and indices one less, got {sizes}")
    for level, (weight, embedding) in enumerate(zip(weights, embeddings)):
        check_tensor(f"weights[{level}]", weight, 2, "[M, K]")
        check_tensor(f"embeddings[{level}]", embedding, 3, "[B, K, N]")
        if weight.shape[1] != embedding.shape[1]:
            raise ValueError(f"embeddings[{level}] must have weights[{level}]'s K, {weight.shape[1]}, got {embedding.shape[1]}")
        if weight.shape[0] != weights[0].shape[0]:
            raise ValueError(f"weights[{level}] must have weights[0]'s M, {weights[0].shape[0]}, got {weight.shape[0]}")
        if embedding.shape[2] != embeddings[0].shape[2]:
            raise ValueError(f"embeddings[{level}] must have embeddings[0]'s N, {embeddings[0].shape[2]}, got {embedding.shape[2]}")
        for name, x in (("weights", weight), ("embeddings", embedding)):
            if x.device != embeddings[0].device:
                raise ValueError(f"{name}[{level}] must be on embeddings[0]'s device, {embeddings[0].device}, got {x.device}")
            if x.dtype != embeddings[0].dtype and autocast_dtype(x) != autocast_dtype(embeddings[0]):
                raise ValueError(f"{name}[{level}] must have embeddings[0]'s dtype, {embeddings[0].dtype}, got {x.dtype}")
    rows, device = embeddings[-1].shape[0], embeddings[-1].device
    for level, index in enumerate(indices):
        name, size = f"indices[{level}]", embeddings[level].shape[0]
        if isinstance(index, CandidateIndex):
            index.check(rows, size, names=("the last embeddings have", f"embeddings[{level}] has"))
            continue
        check_integers(name, index)
        if index.shape[0] != rows:
            raise ValueError(f"{name} must have one entry per row of the last embeddings, {rows}, got {index.shape[0]}")
        if index.device not in (device, torch.device("cpu")):
            raise ValueError(f"{name} must be on the embeddings' device, {device}, or the host, got {index.device}")
        if values_are_checkable(index) and rows and not 0 <= int(index.min()) <= int(index.max()) < size:
            found = f"values {int(index.min())} to {int(index.max())}"
            raise ValueError(f"{name} must be 0 to {size - 1}, the rows of embeddings[{level}], got {found}")


def block_diagonal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    *,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Rotary | None = None,
    schedule: None = None,
    implementation: str = "auto",
) -> Tensor:
    """Softmax attention within blocks of `block_size` rows, counted from the start of each segment; the last one may be shorter.

    Gradients flow to q, k and v.

    Args:
        q: `[L, H, D]` fp32, fp16 or bf16 (on the CPU also fp64), k, v: `[L, Hkv, D]`, same dtype, D 1 to 256, even with rotary. Any row
            and head stride: views of a packed projection are read in place. H is a multiple of Hkv.
        offsets: `[B + 1]` int32 or int64, on q's device or the host.
        block_size: 16, 32, 64 or 128.
        scale: factor of q kᵀ; 1/sqrt(D) by default.
        rotary: rotates q and k, and v where it says so; by positions within the segments, or by given ones.
        schedule: None. The pattern follows from the offsets alone.
        implementation: "auto" (kernels of its own on CUDA, jagged_attention with a segment for each block on the CPU), "reference",
            "triton", or "hopper": those that need compute capability 9.0, 16 bits, D a multiple of 8 up to 128 and H = Hkv; "auto"
            takes them there. What needs more shared memory than a multiprocessor has goes through jagged_attention on
            CUDA too: blocks of 128 where D > 128, or in fp32 > 32; before Hopper and on consumer GPUs blocks of 128, and D > 128, or in
            fp32 > 64.

    Returns:
        `[L, H, D]`.

    Raises:
        TypeError: an argument of the wrong kind. ValueError: shapes, dtypes, devices, heads, offsets or positions that do not fit
        together. RuntimeError: a second derivative; the reference has it.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x, 3, "[L, H, D]")
    q, k, v = (autocast(x) for x in (q, k, v))
    _check_block_attention(q, k, v, offsets, block_size, scale, rotary, schedule, implementation)
    scale = q.shape[2] ** -0.5 if scale is None else float(scale)
    offsets = offsets.to(q.device, non_blocking=True)

    if _block_attention_by_kernels(q, block_size, implementation):
        from jagged_kernels.block_attention import triton_block_attention

        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        return triton_block_attention(q, k, v, offsets, *kernel_arguments(rotary, q.device), block_size, scale, implementation)

    if rotary is not None:
        positions = positions_in_segments(offsets, q.shape[0]) if rotary.positions is None else rotary.positions.to(q.device)
        cos, sin = (x.to(q.device)[positions] for x in (rotary.cos, rotary.sin))
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        v = apply_rotary(v, cos, sin) if rotary.rotate == "qkv" else v
    blocks = block_offsets(offsets, block_size, q.shape[0])
    return jagged_attention(q, k, v, blocks, scale=scale, implementation=implementation)


def block_diagonal_attention_packed(
    qkv: Tensor, offsets: Tensor, *, block_size: int = 64, rotary: Rotary | None = None, implementation: str = "auto"
) -> Tensor:
    """`block_diagonal_attention` of q, k and v packed as `[L, 3, H, D]`, whose gradient the kernels write in place of copies of three."""
    qkv = autocast(qkv)
    q, k, v = qkv.unbind(1)
    if not _block_attention_by_kernels(q, block_size, implementation):
        return block_diagonal_attention(q, k, v, offsets, block_size=block_size, rotary=rotary, implementation=implementation)

    from jagged_kernels.block_attention import triton_block_attention_packed

    _check_block_attention(q, k, v, offsets, block_size, None, rotary, None, implementation)
    qkv, offsets = qkv if qkv.stride(-1) == 1 else qkv.contiguous(), offsets.to(qkv.device, non_blocking=True)
    return triton_block_attention_packed(
        qkv, offsets, *kernel_arguments(rotary, qkv.device), block_size, q.shape[2] ** -0.5, implementation
    )


def _block_attention_by_kernels(q: Tensor, block_size: int, implementation: str) -> bool:
    """Whether block attention has kernels for such tensors, and they are asked for."""
    if implementation in ("triton", "hopper") and q.dtype == torch.float64:
        raise ValueError(f"q must be float32, float16 or bfloat16 for implementation {implementation!r}, got torch.float64")
    if implementation == "reference" or implementation == "auto" and (not q.is_cuda or q.dtype == torch.float64):
        return False

    from jagged_kernels.block_attention import block_attention_fits

    return implementation == "hopper" or block_attention_fits(q.shape[2], q.element_size(), q.device, block_size)


def _check_block_attention(q, k, v, offsets, block_size, scale, rotary, schedule, implementation) -> None:
    check_offsets("offsets", offsets, q.shape[0])
    if offsets.device not in (q.device, torch.device("cpu")):
        raise ValueError(f"offsets must be on q's device, {q.device}, or the host, got {offsets.device}")
    if implementation not in BLOCK_IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {BLOCK_IMPLEMENTATIONS}, got {implementation!r}")
    _check_attention(q, k, v, None, None, scale, "softmax", 1, None, schedule, "auto")
    if v.shape != k.shape or k.shape[0] != q.shape[0]:
        raise ValueError(f"k and v must be [L, Hkv, D] of q {list(q.shape)}, got {list(k.shape)} and {list(v.shape)}")
    check_size("block_size", block_size)
    if block_size not in BLOCKS:
        raise ValueError(f"block_size must be one of {BLOCKS}, got {block_size}")
    check_rotary(rotary, q, offsets)


def _check_attention(q, k, v, q_offsets, kv_offsets, scale, activation, output_scale, mask, schedule, implementation) -> None:
    """Everything that needs no offset values."""
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise ValueError(f"{name} must have q's dtype, {q.dtype}, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} must be on q's device, {q.device}, got {x.device}")
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(f"v must have k's rows and heads, {list(k.shape[:2])}, got {list(v.shape[:2])}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's head dim, {q.shape[2]}, got {k.shape[2]}")
    if q.shape[1] == 0 or k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"q's heads must be a multiple of k's, got {q.shape[1]} and {k.shape[1]}")
    for name, x in (("q", q), ("v", v)):
        if not 1 <= x.shape[2] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}'s head dim must be 1 to {MAX_HEAD_DIM}, got {x.shape[2]}")
    for name, offsets in (("q_offsets", q_offsets), ("kv_offsets", kv_offsets)):
        if isinstance(offsets, str):
            if offsets != "shared":
                raise ValueError(f'{name} must be a tensor or "shared", got "{offsets}"')
        elif isinstance(offsets, Tensor) and offsets.device not in (q.device, torch.device("cpu")):
            raise ValueError(f"{name} must be on q's device, {q.device}, or the host, got {offsets.device}")
    if isinstance(q_offsets, str) and isinstance(kv_offsets, str):
        raise ValueError('q_offsets and kv_offsets cannot both be "shared": the number of segments would be unknown')
    if scale is not None and not isinstance(scale, (int, float)):  # a tensor would get no gradient
        raise TypeError(f"scale must be a number, got {type(scale).__name__}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if not isinstance(output_scale, Tensor):
        if not isinstance(output_scale, (int, float)):
            raise TypeError(f"output_scale must be a number or a tensor [B], got {type(output_scale).__name__}")
    elif not output_scale.is_floating_point():
        raise TypeError(f"output_scale must be floating point, got {output_scale.dtype}")
    if activation == "softmax" and (isinstance(output_scale, Tensor) or output_scale != 1):
        raise ValueError(f"output_scale must be 1 with softmax, got {output_scale}")
    if mask is not None and not isinstance(mask, AttentionMask):
        raise TypeError(f"mask must be an AttentionMask, got {type(mask).__name__}")
    if mask is not None and isinstance(kv_offsets, str):
        raise ValueError("mask must be None where keys are shared by all segments: their rows have no position")
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"implementation must be one of {IMPLEMENTATIONS}, got {implementation!r}")
    if schedule is None:
        return
    if not isinstance(schedule, TileSchedule):
        raise TypeError(f"schedule must be a TileSchedule, got {type(schedule).__name__}")
    if schedule.num_heads != q.shape[1]:
        raise ValueError(f"schedule was built for {schedule.num_heads} heads, q has {q.shape[1]}")
    for half in (schedule, schedule.backward or schedule):
        if half.block_m not in BLOCKS:
            raise ValueError(f"schedule must have a block_m of {BLOCKS}, the kernels' tiles, got {half.block_m}")


def _check_per_segment(q, q_offsets, kv_offsets, output_scale, mask) -> None:
    """Tensors `[B]` that come with the offsets."""
    num_segments = q_offsets.shape[0] - 1
    num_targets = None if mask is None else mask.num_targets
    for name, x in (("output_scale", output_scale), ("mask.num_targets", num_targets)):
        if not isinstance(x, Tensor):
            continue
        if x.shape != (num_segments,):
            raise ValueError(f"{name} must have shape [B] = [{num_segments}], got {list(x.shape)}")
        if x.device not in (q.device, torch.device("cpu")):
            raise ValueError(f"{name} must be on q's device, {q.device}, or the host, got {x.device}")
    if num_targets is not None and values_are_checkable(num_targets) and values_are_checkable(kv_offsets):
        lengths = kv_offsets.diff().to(num_targets)
        if num_targets.numel() and bool((num_targets > lengths).any()):
            segment = int((num_targets > lengths).int().argmax())
            raise ValueError(
                f"mask.num_targets must be at most the segment's length, got {int(num_targets[segment])} of {int(lengths[segment])} "
                f"at segment {segment}"
            )


def _check_schedule(schedule: TileSchedule, q_offsets: Tensor) -> None:
    """ValueError unless the schedule has as many tiles as these segments need, where its values are checkable."""
    if not values_are_checkable(schedule.num_tiles):
        return
    expected = int(((q_offsets.diff() + schedule.block_m - 1) // schedule.block_m).sum()) * schedule.num_heads
    if int(schedule.num_tiles) != expected:
        raise ValueError(f"schedule was built for other lengths: it has {int(schedule.num_tiles)} tiles, q_offsets need {expected}")
