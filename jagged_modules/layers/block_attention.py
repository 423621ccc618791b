"""BlockDiagonalSelfAttention: each row attends to the rows of its own block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.jagged import C, wrap_rows
from ..dropout import check_dropout
from ..functional import block_diagonal_attention_packed
from ..functional.attention_arguments import BLOCKS
from ..functional.block_attention import runs_kernels
from ..functional.tail import entering, leaving
from ..rotary import Rotary, rotary_tables
from ..scalars import check_choice, check_size
from ..segments import check_offsets
from ..validation import resolve_head_dim
from .block_attention_node import BlockAttention, block_attention_node
from .invariant import fixed_module
from .one_node import in_training, node_dtype
from .parameters import Layer, in_heads, name_keywords


@name_keywords
class BlockDiagonalSelfAttention(Layer):
    """Multi-head softmax attention within blocks of rows, with rotary positions. Blocks are counted
    from the start of each segment.

        [q | k | v] = x W + b        out = block_diagonal_attention(q, k, v) W_o + b_o

    Time and memory are linear in the number of rows. The kernels read q, k and v in place from the
    packed projection, rotate them in fp32, and write the gradients into one packed tensor. They
    save only the packed projection for the backward.

    Args:
        embedding_dim: width E of the rows; a multiple of num_heads, and of 2 · num_heads with
            rotary.
        num_heads: attention heads.
        block_size: rows of a block: 16, 32, 64 or 128. The last block of a segment may be shorter.
        rotary: what is rotated by the position in the segment: "qk" (queries and keys), "qkv"
            (values too), or None.
        device: device of the parameters and tables.
        dtype: dtype of the parameters; torch.get_default_dtype() if None. The tables are fp32.
        max_seqlen: the longest segment allowed with rotary. It is the number of rows of the cos and
            sin tables, which are fp32 for every dtype of the layer.
        attention_dropout: dropout probability of the attention weights, below 1.

    Raises:
        TypeError, ValueError: a size is not a positive integer; num_heads does not divide
            embedding_dim; the head dim is above 256, or odd with rotary; block_size or rotary is
            not one of the values above; attention_dropout is not in 0 to 1, or is 1.

    Example::

        attention = jm.BlockDiagonalSelfAttention(32, num_heads=4, block_size=16)
        # 16, 4; 16, 14 rows
        values, offsets = attention((torch.randn(50, 32), torch.tensor([0, 20, 50])))
    """

    _shown = "embedding_dim", "num_heads", "block_size", "rotary", "max_seqlen"

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        block_size: int = 64,
        rotary: str | None = "qk",
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        max_seqlen: int = 8192,
        attention_dropout: float = 0,
    ) -> None:
        super().__init__(dtype)
        self.head_dim = resolve_head_dim(embedding_dim, num_heads)
        check_size("block_size", block_size)
        if block_size not in BLOCKS:
            raise ValueError(f"block_size must be one of {BLOCKS}, got {block_size}")
        check_choice("rotary", rotary, ("qk", "qkv", None), '"qk", "qkv" or None')
        check_size("max_seqlen", max_seqlen)
        check_dropout("attention_dropout", attention_dropout)
        if rotary is not None and self.head_dim % 2:
            raise ValueError(
                f"embedding_dim / num_heads must be even with rotary, got {embedding_dim} and"
                f" {num_heads}"
            )
        self.embedding_dim, self.num_heads, self.block_size = embedding_dim, num_heads, block_size
        self.rotary, self.max_seqlen = rotary, max_seqlen
        self.attention_dropout = attention_dropout
        self.qkv_proj = nn.Linear(embedding_dim, 3 * embedding_dim, device=device, dtype=dtype)
        self.tables = (
            None if rotary is None else _RotaryTables(self.head_dim, max_seqlen, device=device)
        )
        self.out_proj = nn.Linear(embedding_dim, embedding_dim, device=device, dtype=dtype)

    @fixed_module
    def forward(self, x: C) -> C:
        """Attend within the blocks of each segment.

        Args:
            x: any container of `[L, E]` values. With rotary, no segment may be longer than
                max_seqlen.

        Returns:
            x's kind of container, with `[L, E]` values in the dtype of the projections.

        Raises:
            TypeError, ValueError: x has another type, shape, dtype or device, or a segment that is
                too long.
        """
        jagged = wrap_rows("x", x, self.embedding_dim, self.qkv_proj)
        end, rotary = jagged.end("x"), None
        if self.tables is not None and self.rotary is not None:
            check_offsets("x's offsets", jagged.offsets, max_seqlen=self.max_seqlen)
            rotary = Rotary(self.tables.cos, self.tables.sin, self.rotary, linear=True)
        dropout = in_training(self, self.attention_dropout)
        dtype = node_dtype(jagged.values, (self.qkv_proj, self.out_proj))
        if dtype and runs_kernels(jagged.device, dtype, self.head_dim, self.block_size):
            sizes = self.num_heads, self.block_size
            attention = BlockAttention(jagged.offsets, end, *sizes, rotary, dtype, dropout)
            linears = self.qkv_proj, self.out_proj
            return jagged.unwrap(block_attention_node(jagged.values, *linears, attention))
        projected = self.qkv_proj(entering(jagged.values, end))
        qkv = in_heads("qkv_proj", projected, 3, self.num_heads, self.head_dim)
        out = block_diagonal_attention_packed(
            qkv, jagged.offsets, block_size=self.block_size, rotary=rotary, dropout_p=dropout
        )
        return jagged.unwrap(leaving(self.out_proj(out.flatten(1)), end))


class _RotaryTables(nn.Module):
    """The buffers cos and sin `[max_seqlen, head_dim / 2]`. They stay fp32 when the layer's dtype
    changes; only their device changes. If the layer is built on the meta device, they are on the
    host: DistributedModelParallel zeroes buffers on meta and resets only modules that own
    parameters. It moves host buffers to the device with the rest of the model."""

    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, max_seqlen: int, device: Device = None) -> None:
        super().__init__()
        self.sizes = head_dim, max_seqlen
        self._make(torch.empty(0, device=device).device)

    def _make(self, device: torch.device) -> None:
        tables = rotary_tables(*self.sizes, device="cpu" if device.type == "meta" else device)
        for name, table in zip(("cos", "sin"), tables):
            self.register_buffer(name, table, persistent=False)

    def reset_parameters(self) -> None:
        """Recompute the tables, for callers that replaced the buffers with uninitialised memory."""
        self._make(self.cos.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _RotaryTables:
        # only fn's device is used: fn may also round the values (half) or drop them (to_empty)
        device = fn(self.cos[:0]).device
        if device.type != "meta":
            self.cos, self.sin = self.cos.to(device), self.sin.to(device)
        return self
