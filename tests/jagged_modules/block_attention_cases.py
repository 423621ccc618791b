"""Block attention as a loop over segments and blocks, and inputs of its tests."""

import torch

import jagged_modules as jm


def rotated(x, cos, sin):
    """Rows rotated by complex multiplication, in fp32 or fp64, and rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    pairs = torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)).contiguous())
    return (
        torch.view_as_real(pairs * torch.complex(cos, sin).to(pairs.dtype)[:, None])
        .flatten(-2)
        .to(x.dtype)
    )


def blockwise_attention(q, k, v, offsets, block_size=64, scale=None, rotary=None):
    """Dense softmax attention of every block by itself."""
    group, scale = q.shape[1] // k.shape[1], q.shape[2] ** -0.5 if scale is None else scale
    outputs = [0 * q[:0]]
    for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist()):
        for first in range(start, end, block_size):
            rows = range(first, min(first + block_size, end))
            queries, keys, values = (x[rows.start : rows.stop] for x in (q, k, v))
            if rotary is not None:
                positions = [
                    row - start if rotary.positions is None else int(rotary.positions[row])
                    for row in rows
                ]
                tables = rotary.cos[positions], rotary.sin[positions]
                queries, keys = rotated(queries, *tables), rotated(keys, *tables)
                values = rotated(values, *tables) if rotary.rotate == "qkv" else values
            keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
            p = (torch.einsum("ihd,jhd->hij", queries, keys) * scale).softmax(-1)
            outputs.append(torch.einsum("hij,jhd->ihd", p, values))
    return torch.cat(outputs)


def make_qkv(rows, heads=2, kv_heads=None, dim=8, dtype=torch.float32):
    return [
        torch.randn(rows, h, dim).to(dtype) for h in (heads, kv_heads or heads, kv_heads or heads)
    ]


def make_rotary(kind, dim, rows=0, max_seqlen=1000):
    """Rotary of "qk" or "qkv", with given positions in no order where it ends in "-given"; None
    without a kind."""
    if kind is None:
        return None
    rotary = jm.Rotary.from_frequencies(dim, max_seqlen, kind.removesuffix("-given"))
    return (
        jm.Rotary(rotary.cos, rotary.sin, rotary.rotate, torch.randint(max_seqlen, (rows,)))
        if kind.endswith("given")
        else rotary
    )
