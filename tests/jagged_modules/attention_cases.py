"""Inputs of jagged attention, and its comparison with the accuracy model."""

import accuracy
import torch

import jagged_modules as jm
from jagged_modules import functional as F

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def make_qkv(q_rows, kv_rows, heads=2, kv_heads=None, dim=8, v_dim=None, dtype=torch.float32):
    kv_heads = kv_heads or heads
    shapes = (q_rows, heads, dim), (kv_rows, kv_heads, dim), (kv_rows, kv_heads, v_dim or dim)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(q, k, v, q_offsets, kv_offsets, grad=None, output_scale=1.0, **options):
    """Check the function and its gradients by the accuracy rule, including the gradient of an
    output_scale that requires one."""
    tensors = dict(q=q, k=k, v=v)
    if isinstance(output_scale, torch.Tensor) and output_scale.requires_grad:
        tensors["output_scale"] = output_scale

    def operator(q, k, v, output_scale=output_scale):
        return F.jagged_attention(
            q, k, v, q_offsets, kv_offsets, output_scale=output_scale, **options
        )

    def bounds(q, k, v, *rest):
        return accuracy.attention(
            q, k, v, rest[-1], q_offsets, kv_offsets, output_scale=output_scale, **options
        )

    accuracy.check(operator, bounds, tensors, grad)


def mask_of(name, num_targets):
    num_targets = torch.tensor(num_targets)
    return {
        "none": None,
        "causal": jm.AttentionMask(causal=True),
        "window": jm.AttentionMask(window=(2, 1)),
        "targets": jm.AttentionMask(num_targets=num_targets, target_group_size=2),
        "hstu": jm.AttentionMask(
            True, None, num_targets, 2, contextual_seqlen=2, max_attn_len=3, min_full_attn_seqlen=1
        ),
        "semi-local": jm.AttentionMask(
            True, (1, None), num_targets, global_prefix=2, recent_history=4
        ),
    }[name]
