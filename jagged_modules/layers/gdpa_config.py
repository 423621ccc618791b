"""Options of JaggedGDPA."""

from __future__ import annotations

import dataclasses

from ..dropout import check_dropout
from ..scalars import check_flag, check_number, check_sizes


@dataclasses.dataclass(frozen=True)
class GDPAConfig:
    """The less common options of `JaggedGDPA`.

    Args:
        head_dim: width D of each head; embedding_dim / num_heads if None.
        num_kv_heads: heads of keys and values, a divisor of num_heads; num_heads if None.
        qk_norm: apply RMSNorm, in fp32 and with learned weights, over the head dim of queries and
            keys.
        scale: factor of q kᵀ before the activation; 1/sqrt(D) if None.
        output_scale: factor after the activation; must be 1 with softmax.
        dropout: dropout probability, applied to the attention's result before the output
            projection.
        num_seeds: number of learned queries, the same for every segment (pooling by multi-head
            attention, PMA). 0: x gives the queries.
        num_weights: number of learned keys and values, the same for every segment (a feed-forward:
            activation(q Kᵀ) V). 0: x or context gives keys and values.
        attention_dropout: dropout probability of the attention weights activation(scale · q kᵀ),
            below 1.

    Raises:
        TypeError, ValueError: a field has another type or is out of range; both num_seeds and
            num_weights are given.
    """

    head_dim: int | None = None
    num_kv_heads: int | None = None
    qk_norm: bool = False
    scale: float | None = None
    output_scale: float = 1.0
    dropout: float = 0.0
    num_seeds: int = 0
    num_weights: int = 0
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_sizes(self, "head_dim", "num_kv_heads", optional=True)
        check_flag("qk_norm", self.qk_norm)
        if self.scale is not None:
            check_number("scale", self.scale)
        check_number("output_scale", self.output_scale)
        check_number("dropout", self.dropout, 0, 1)
        check_dropout("attention_dropout", self.attention_dropout)
        check_sizes(self, "num_seeds", "num_weights", at_least=0)
        if self.num_seeds and self.num_weights:
            raise ValueError(
                f"num_seeds and num_weights must not both be given, got {self.num_seeds} and"
                f" {self.num_weights}"
            )
