"""Peers, which are measured if they can be imported and reported as unavailable if not.

Every function imports its peer when it is called, so that the benchmark's row names the missing
module. All take this project's inputs.
"""

import importlib
import os
from collections.abc import Callable

import torch
from torch import Tensor

SLL = "FBGEMM sll"  # in Triton
SLL_CUDA = "FBGEMM sll, CUDA"
IKBO = "FBGEMM ikbo (Triton)"
META_GDPA = "Meta gdpa (Triton)"
# name -> module
FLASH_ATTENTION = {
    "FlashAttention-3": "flash_attn_interface",
    "FlashAttention-4": "flash_attn.cute",
}


def flash_attention(module: str, causal: bool = False) -> Callable[..., Tensor]:
    """``attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv)``, as varlen_attention of
    inputs.py."""
    attend = importlib.import_module(module).flash_attn_varlen_func
    options = {"causal": True} if causal else {}

    def attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv):
        out = attend(
            q,
            k,
            v,
            cu_seqlens_q=q_offsets,
            cu_seqlens_k=kv_offsets,
            max_seqlen_q=max_q,
            max_seqlen_k=max_kv,
            **options,
        )
        return out[0] if isinstance(out, tuple) else out

    return attention


def sll(name: str) -> Callable[..., Tensor]:
    """One of FBGEMM's operators for sequences of variable length."""
    importlib.import_module("fbgemm_gpu.sll")
    return getattr(torch.ops.fbgemm, f"sll_{name}")


def sll_operators(
    lengths: Tensor, offsets: Tensor, p_offsets: Tensor, longest: int
) -> dict[str, dict[str, Callable[..., Tensor]]]:
    """FBGEMM's operators by implementation and by this project's names.

    Three of them have a CUDA implementation too, which FBGEMM takes by default.

    Args:
        lengths, offsets: of the segments' rows.
        p_offsets: of the segments' scores.
        longest: the maximum length.
    """
    rows, scores = (lengths, offsets), (lengths * lengths, p_offsets)

    def in_both(cuda: bool) -> dict[str, Callable[..., Tensor]]:
        return {
            "jagged_dense_bmm": lambda x, y: sll("jagged_dense_bmm")(
                x, y, offsets, longest, True, cuda
            ),
            "jagged_jagged_bmm": lambda x, y: sll("jagged_jagged_bmm")(
                x, y, offsets, longest, True, cuda
            ),
            "jagged_softmax": lambda x: sll("jagged_softmax")(x, offsets, longest, cuda),
        }

    in_triton = {
        "jagged_jagged_bmm_jagged_out": lambda x, y: sll("jagged_jagged_bmm_jagged_out")(
            x, y, *rows, *rows, *scores, longest, True
        ),
        "array_jagged_bmm_jagged_out": lambda p, y: sll("array_jagged_bmm_jagged_out")(
            p, y, *scores, *rows, *rows, longest, True
        ),
        "jagged2_softmax": lambda p: sll("jagged2_softmax")(p, offsets, p_offsets, longest, False),
    }
    return {SLL: in_both(False) | in_triton, SLL_CUDA: in_both(True)}


def keep_configurations(tuner, **values: tuple[int, ...]) -> None:
    """Keeps an autotuned kernel's configurations with one of the given values of each name: trying
    all takes minutes."""
    tuner.configs = [
        x
        for x in tuner.configs
        if all({**x.kwargs, **vars(x)}[name] in kept for name, kept in values.items())
    ]


def ikbo_attention() -> Callable[..., Tensor]:
    """``attention(q [C, n, H, D], k, v [U·N, H, D], candidate_to_user, N)``, forward only.

    Tries those of its 320 configurations with as many rows as a candidate has and with common
    values of the others.
    """
    module = importlib.import_module("ikbo.ops.triton_ikbo_fa")
    keep_configurations(
        module._attn_fwd_tma,
        BLOCK_M=(64,),
        BLOCK_N=(64, 128),
        num_warps=(4, 8),
        num_stages=(2, 3, 4),
    )

    def attention(q, k, v, candidate_to_user, history):
        out = module.triton_flash_attn_ikbo_tma(
            q.flatten(0, 1), k, v, candidate_to_user.int(), q.shape[1], history
        )
        return out.view(q.shape)

    return attention


def ikbo_linear_compress() -> Callable[..., Tensor]:
    """``compress(w_user, w_cand, e_user, e_cand, candidate_to_user)``, forward only. Tries those of
    its 64 configurations with large tiles."""
    module = importlib.import_module("ikbo.ops.triton_ikbo_lce")
    keep_configurations(module.triton_ikbo_lce_kernel, BM=(128,), BN=(128,), num_stages=(3, 4))
    return lambda w_user, w_cand, e_user, e_cand, index: module.triton_ikbo_lce(
        w_cand, w_user, e_cand, e_user, index
    )


def meta_gdpa() -> Callable[..., Tensor]:
    """``attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv)`` with tanh-GELU and no scale.

    The environment variable GDPA_AUTOTUNE_CONFIG_SET names the set of configurations to try; by
    default the smaller of Meta's two.
    """
    os.environ.setdefault("GDPA_AUTOTUNE_CONFIG_SET", "omnifm_v2")
    module = importlib.import_module(
        "ads_mkl.ops.oss.gdpa.triton.triton_generalized_dot_product_attention"
    )

    def attention(q, k, v, q_offsets, kv_offsets, max_q, max_kv):
        return module.generalized_dot_product_attention(
            query=q,
            key=k,
            value=v,
            query_offset=q_offsets,
            key_offset=kv_offsets,
            output_offset=q_offsets,
            max_seq_len_q=max_q,
            max_seq_len_kv=max_kv,
            activation="fast_gelu",
            qk_scale=1.0,
        )

    return attention
