"""JaggedGDPA: attention with any activation: self-attention, cross-attention, pooling by learned
queries, or a feed-forward."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from jagged_kernels.attention.pages import Pages
from torch import Tensor, nn
from torch.types import Device

from ..activations import ACTIVATIONS
from ..bias import RelativeBias
from ..containers.history_cache import HistoryCache
from ..containers.jagged import C, Jagged, check_same_segments, wrap_rows
from ..containers.pages import paged_operands
from ..dropout import check_dropout
from ..functional.attention import attend
from ..functional.attention_arguments import check_mask
from ..functional.attention_bias import check_layer_bias
from ..functional.attention_call import AttentionOptions
from ..functional.tail import entering, leaving
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_choice, check_flag, check_kind, check_number, check_sizes
from ..segments import RowSegments
from ..tracing import as_constant, through_call
from ..validation import resolve_head_dim
from .cached_projections import CachesProjection
from .from_torch import checked_attention, like, load_attention, place
from .gdpa_node import Sides, gdpa_dtype, gdpa_node
from .invariant import fixed_module
from .norms import RMSNorm
from .one_node import cast_linears, in_training
from .parameters import in_heads, name_keywords

if TYPE_CHECKING:
    from typing_extensions import Self


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


@name_keywords
class JaggedGDPA(CachesProjection):
    """Generalised dot-product attention within each segment: any activation may replace softmax. It
    adds no norm and no residual.

        q = W_q x,  [k | v] = W_kv x or W_kv context, per head
        out = W_o · activation(scale · q kᵀ) · output_scale · v

    With `activation="gelu_tanh"` and `GDPAConfig(qk_norm=True)` this is "Generalized Dot-Product
    Attention" (PyTorch blog, Meta).

    | config | queries | keys and values |
    |---|---|---|
    | | the rows of x | the rows of x, or of context |
    | num_seeds | learned | the rows of x |
    | num_weights | the rows of x | learned |

    Learned rows are shared by all segments and never replicated.

    Args:
        embedding_dim: width E of the rows, in and out.
        num_heads: query heads.
        activation: "softmax" or any other of `functional.jagged_attention`.
        mask: which keys each row sees; all if None. Must be None with learned rows, which have no
            position.
        config: the other options; `GDPAConfig()` if None.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: an argument has another type; num_heads does not divide embedding_dim
            and config.head_dim is None; the head dim is above 256; num_kv_heads does not divide
            num_heads; the activation is unknown; softmax with an output_scale; a mask with learned
            rows.

    Example::

        x = torch.randn(5, 32), torch.tensor([0, 2, 5])  # two users with 2 and 3 events
        values, offsets = jm.JaggedGDPA(32, num_heads=4, mask=jm.AttentionMask(causal=True))(x)
        pooled = jm.JaggedGDPA(32, num_heads=4, config=jm.GDPAConfig(num_seeds=2))(x)  # [2, 2, 32]
    """

    _shown = "embedding_dim", "num_heads", "activation", "mask", "config"

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        activation: str = "gelu_tanh",
        mask: AttentionMask | None = None,
        config: GDPAConfig | None = None,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        config = GDPAConfig() if config is None else config
        check_kind("config", config, GDPAConfig, "a GDPAConfig")
        self.head_dim = resolve_head_dim(embedding_dim, num_heads, config.head_dim)
        self.num_kv_heads = num_heads if config.num_kv_heads is None else config.num_kv_heads
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, got {num_heads} and"
                f" {self.num_kv_heads}"
            )
        check_choice("activation", activation, ACTIVATIONS)
        if activation == "softmax" and config.output_scale != 1:
            raise ValueError(f"output_scale must be 1 with softmax, got {config.output_scale}")
        check_mask(mask)
        if mask is not None and (config.num_seeds or config.num_weights):
            raise ValueError(
                "mask must be None with num_seeds or num_weights: learned rows have no position"
            )
        self.embedding_dim, self.num_heads, self.activation = embedding_dim, num_heads, activation
        self.mask, self.config = mask, config
        width, kv_width = num_heads * self.head_dim, self.num_kv_heads * self.head_dim

        def learned_rows(count: int, heads: int) -> nn.Parameter:
            return nn.Parameter(
                torch.empty(count, heads, self.head_dim, device=device, dtype=dtype)
            )

        if config.num_seeds:
            self.seeds = learned_rows(config.num_seeds, num_heads)
        else:
            self.q_proj = nn.Linear(embedding_dim, width, device=device, dtype=dtype)
        if config.num_weights:
            self.key_weights = learned_rows(config.num_weights, self.num_kv_heads)
            self.value_weights = learned_rows(config.num_weights, self.num_kv_heads)
        else:
            self.kv_proj = nn.Linear(embedding_dim, 2 * kv_width, device=device, dtype=dtype)
        norms: list[nn.Module] = [nn.Identity(), nn.Identity()]
        if config.qk_norm:
            norms = [RMSNorm(self.head_dim, device=device, dtype=dtype) for _ in norms]
        self.q_norm, self.k_norm = norms
        self.dropout = nn.Dropout(config.dropout)
        self.out_proj = nn.Linear(width, embedding_dim, device=device, dtype=dtype)
        self.reset_parameters()

    @classmethod
    def from_torch(cls, module: nn.MultiheadAttention, mask: AttentionMask | None = None) -> Self:
        """Softmax attention with the weights of an nn.MultiheadAttention, as
        `JaggedTargetAttention.from_torch`: self-attention, or attention to a context.

        Args:
            module: as in `JaggedTargetAttention.from_torch`.
            mask: which the module is given in its calls, as `AttentionMask(causal=True)`.

        Raises:
            TypeError, ValueError: as `JaggedTargetAttention.from_torch`.
        """
        given = checked_attention(module)
        config = GDPAConfig(attention_dropout=given.dropout)
        where = place(module)
        layer = cls(given.embed_dim, given.num_heads, "softmax", mask, config, **where)
        load_attention(layer, module)
        return like(layer, module)

    def reset_parameters(self) -> None:
        """Initialise all parameters, for instance after `to_empty` of a layer built on the meta
        device.

        Projections are initialised as by nn.Linear and norms with 1. Seeds and learned keys have
        variance 1, learned values variance 1 / num_weights.
        """
        super().reset_parameters()
        if self.config.num_seeds:
            nn.init.normal_(self.seeds)
        if self.config.num_weights:
            nn.init.normal_(self.key_weights)
            nn.init.normal_(self.value_weights, std=self.config.num_weights**-0.5)

    @through_call
    def cache(self, context: Any) -> HistoryCache:  # pyright: ignore[reportIncompatibleMethodOverride] - of another name
        """Compute the keys and values of the context's rows, for any number of later calls of
        `score`.

        Args:
            context: any container of `[M, E]` values in B segments, for example users' histories.

        Returns:
            The cache, with one layer of values `[M, num_kv_heads, 2 · head_dim]`.

        Raises:
            TypeError, ValueError: as `forward`; the config has num_seeds or num_weights.
        """
        return self._cached("context", context)[1]

    @through_call
    def score(
        self,
        x: C,
        cache: HistoryCache,
        num_targets: Tensor | None = None,
        bias: RelativeBias | None = None,
    ) -> C:
        """Attend from x to cached contexts: `forward(x, context, num_targets, bias)` without
        projecting the contexts.

        A mask takes the rows of x for the last rows of the context. So in a causal self-attention
        the outputs of new events are `score(events, cache)`, after the events were appended to the
        cache.

        Args:
            x, num_targets, bias: as in `forward`.
            cache: the result of `cache` for the contexts, or of `PagedHistoryCache.select`. It is
                valid until the parameters change.

        Returns:
            As `forward`.

        Raises:
            TypeError, ValueError: as `forward`; the cache does not fit the layer.
        """
        rows = self._wrapped("x", x)
        keys = self._layer_of(cache, "x", rows)
        mask = self._checked_options(rows, keys, "cache", num_targets, bias)
        values, pages = paged_operands(keys)
        k, v = values.chunk(2, dim=2)
        end = rows.end("x")
        q = self._queries(entering(rows.values, end))
        out = self._attend(q, k, v, rows, keys, mask, bias, pages)
        return rows.unwrap(leaving(out, end))

    append_reads_cache = False  # for PagedHistoryCache

    @fixed_module
    def forward(
        self,
        x: C,
        context: Any = None,
        num_targets: Tensor | None = None,
        bias: RelativeBias | None = None,
    ) -> C:
        """Attend within each segment.

        Args:
            x: any container of `[L, E]` values in B segments.
            context: any container of `[M, E]` values in B segments; its rows replace those of x as
                keys and values.
            num_targets: `[B]` int32 or int64, the number of rows at the end of each segment that
                are targets. Replaces the mask's.
            bias: biases of the scores by relative position and time, on the values' device.

        Returns:
            x's kind of container, with `[L, E]` values; with seeds, a dense tensor
            `[B, num_seeds, E]`. The dtype is that of the projections. The result of a row that sees
            no key is out_proj's bias. Type checkers, which do not know the config, take the dense
            tensor for x's kind of container: use `typing.cast`.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not
                match; context, num_targets or bias is given with learned rows.
        """
        config, rows = self.config, wrap_rows("x", x, self.embedding_dim, self.out_proj)
        dtype = gdpa_dtype(self, rows.values, bias)
        if dtype is not None:
            sides = self._sides(rows, context, num_targets, dtype)
            of_queries: Tensor = self.seeds if config.num_seeds else rows.values
            return self._unwrapped(rows, gdpa_node(self, of_queries, None, dtype, sides))
        end = rows.end("x")
        values = entering(rows.values, end)
        keys, keys_name, mask = self._checked_inputs(rows, context, num_targets, bias)
        k: Tensor
        v: Tensor
        if config.num_weights:
            k, v = self.k_norm(self.key_weights), self.value_weights
        elif keys is rows:
            k, v = self._project(values)
        else:
            k, v = self._project(entering(keys.values, keys.end(keys_name)))
        q = self.q_norm(self.seeds) if config.num_seeds else self._queries(values)
        out = self._attend(q, k, v, rows, keys, mask, bias)
        return self._unwrapped(rows, out if config.num_seeds else leaving(out, end))

    def _unwrapped(self, rows: Jagged, out: Tensor) -> Any:
        if not self.config.num_seeds:
            return rows.unwrap(out)
        return torch.unflatten(out, 0, (rows.num_segments, self.config.num_seeds))

    def _queries(self, rows: Tensor) -> Tensor:
        """Normed queries `[L, num_heads, head_dim]`."""
        (q_proj,) = cast_linears(rows, self.q_proj)
        return self.q_norm(in_heads("q_proj", q_proj(rows), self.num_heads, self.head_dim))

    def _project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Normed keys and values."""
        k, v = super()._project(rows)
        return self.k_norm(k), v

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rows: Jagged,
        keys: Jagged,
        mask: AttentionMask | None,
        bias: RelativeBias | None,
        pages: Pages | None = None,
    ) -> Tensor:
        """The result of the queries: of these rows, or learned."""
        dtype = v.dtype if pages is None else q.dtype  # of pages: maybe 8 bits
        sides_and_options = self._attention(rows, keys, dtype, mask, bias, pages)
        out = attend(q, k, v, *sides_and_options)
        (out_proj,) = cast_linears(out, self.out_proj)
        return out_proj(self.dropout(out.flatten(1)))

    def _attention(
        self,
        rows: Jagged,
        keys: Jagged,
        dtype: torch.dtype,
        mask: AttentionMask | None,
        bias: RelativeBias | None = None,
        pages: Pages | None = None,
    ) -> tuple[RowSegments | None, RowSegments | None, AttentionOptions]:
        """What `attend` takes besides the operands, which have this dtype."""
        config, schedule = self.config, None
        if not config.num_weights:
            schedule = keys.schedule(
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=dtype,
                queries=config.num_seeds or rows,
                mask=mask,
            )
        output_scale = as_constant(config.output_scale)
        options = AttentionOptions(
            self.activation, config.scale, output_scale, mask, bias, schedule, pages=pages,
            dropout_p=in_training(self, config.attention_dropout),
        )  # fmt: skip
        of_rows = None if config.num_seeds else rows.parsed("x")
        of_keys = None if config.num_weights else keys.parsed("context")
        return of_rows, of_keys, options

    def _sides(
        self, rows: Jagged, context: Any, num_targets: Tensor | None, dtype: torch.dtype
    ) -> Sides:
        """What a node takes besides the rows' values."""
        keys, _, mask = self._checked_inputs(rows, context, num_targets, None)
        attention = self._attention(rows, keys, dtype, mask)
        if self.config.num_seeds:
            return Sides(rows.values, (None, rows.end("x")), *attention)
        values, end = (None, None) if keys is rows else (keys.values, keys.end("context"))
        return Sides(values, (rows.end("x"), end), *attention)

    def _wrapped(self, name: str, x: Any) -> Jagged:
        for option in ("num_seeds", "num_weights"):
            if getattr(self.config, option):
                raise ValueError(
                    f"config.{option} must be 0 to cache keys and values of a context, got"
                    f" {getattr(self.config, option)}"
                )
        return super()._wrapped(name, x)

    def _kept(self, rows: Tensor) -> Tensor:
        if self.config.qk_norm:
            return torch.cat(self._project(rows), dim=2)
        return super()._kept(rows)

    def _checked_inputs(
        self, rows: Jagged, context: Any, num_targets: Tensor | None, bias: RelativeBias | None
    ) -> tuple[Jagged, str, AttentionMask | None]:
        """The keys' rows, their name in errors, and the mask with these targets."""
        if self.config.num_seeds or self.config.num_weights:
            given = dict(context=context, num_targets=num_targets, bias=bias)
            for name, argument in given.items():
                if argument is not None:
                    raise ValueError(
                        f"{name} must be None with num_seeds or num_weights, got"
                        f" {type(argument).__name__}"
                    )
        keys, keys_name = rows, "x"
        if context is not None:
            keys_name = "context"
            keys = wrap_rows(keys_name, context, self.embedding_dim, self.out_proj)
            check_same_segments("x", rows, keys_name, keys)
        return keys, keys_name, self._checked_options(rows, keys, keys_name, num_targets, bias)

    def _checked_options(
        self,
        x: Jagged,
        keys: Jagged,
        keys_name: str,
        num_targets: Tensor | None,
        bias: RelativeBias | None,
    ) -> AttentionMask | None:
        """The mask with these targets. Errors call the keys `keys_name`."""
        mask, name = self.mask, "mask.num_targets"
        if num_targets is not None:
            mask = AttentionMask() if mask is None else mask
            mask, name = dataclasses.replace(mask, num_targets=num_targets), "num_targets"
        if mask is not None:
            check_num_targets(name, mask.num_targets, keys.offsets, keys.device, "the layer's")
        if bias is not None:
            check_layer_bias(bias, self.num_heads, ("x", x), (keys_name, keys))
        return mask
