"""The operators as functions of plain tensors. Each checks its arguments, selects an implementation
by device, and calls it."""

import torch

from ..dtypes import dtype_table
from ..rotary import apply_rotary
from .attention import jagged_attention
from .block_attention import block_diagonal_attention, block_diagonal_attention_packed
from .din_attention import din_attention
from .layer_norm import jagged_layer_norm
from .linear import jagged_linear
from .linear_compress import linear_compress
from .matmul import (
    array_jagged_bmm_jagged_out,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_jagged_bmm_jagged_out,
)
from .reductions import (
    jagged_between,
    jagged_first,
    jagged_last,
    jagged_max,
    jagged_mean,
    jagged_sum,
)
from .rows import (
    jagged_concat,
    jagged_dense_add,
    jagged_dense_mul,
    jagged_select,
    jagged_split,
    jagged_to_padded,
    padded_to_jagged,
)
from .score_plan import ScorePlan
from .softmax import jagged2_softmax, jagged_softmax
from .target_attention import self_target_attention, target_attention

__all__ = [
    "ScorePlan",
    "apply_rotary",
    "array_jagged_bmm_jagged_out",
    "block_diagonal_attention",
    "block_diagonal_attention_packed",
    "din_attention",
    "jagged2_softmax",
    "jagged_attention",
    "jagged_between",
    "jagged_concat",
    "jagged_dense_add",
    "jagged_dense_bmm",
    "jagged_dense_mul",
    "jagged_first",
    "jagged_jagged_bmm",
    "jagged_jagged_bmm_jagged_out",
    "jagged_last",
    "jagged_layer_norm",
    "jagged_linear",
    "jagged_max",
    "jagged_mean",
    "jagged_select",
    "jagged_softmax",
    "jagged_split",
    "jagged_sum",
    "jagged_to_padded",
    "linear_compress",
    "padded_to_jagged",
    "self_target_attention",
    "target_attention",
]
__doc__ = f"{__doc__}\n\nSupported dtypes:\n\n{dtype_table()}\n"
for _name in __all__[1:]:
    # by name, because callers may call functions of other modules through this one
    torch.fx.wrap(_name)
