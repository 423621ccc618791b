"""JaggedEncoderLayer and JaggedEncoder: transformer encoders of jagged rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..activations import POINTWISE, activation_of_rows
from ..containers.jagged import C, Jagged, wrap_rows
from ..dropout import check_dropout
from ..functional.tail import entering, leaving
from ..masks import AttentionMask
from ..scalars import check_choice, check_kind, check_number, check_size
from .encoder_node import QUERIES, encoder_dtype, encoder_node
from .from_torch import (
    activation_of,
    check_torchs,
    checked_attention,
    joined,
    like,
    linear_of,
    load,
    load_attention,
    load_norm,
    load_projections,
    norm_of,
    place,
    torch_norm,
)
from .gdpa import GDPAConfig, JaggedGDPA
from .invariant import fixed_module
from .norms import RMSNorm, RowNorm
from .parameters import Layer, name_keywords

if TYPE_CHECKING:
    from typing_extensions import Self

NORMS = {"layer": RowNorm, "rms": RMSNorm}


@name_keywords
class JaggedEncoderLayer(Layer):
    """A transformer encoder layer: softmax self-attention within each segment, then a feed-forward
    network of each row, both with a residual and a norm.

        norm_first:  x = x + attention(norm1(x));  x = x + ffn(norm2(x))
        otherwise:   x = norm1(x + attention(x));  x = norm2(x + ffn(x))
        "queries":   y = norm1(x);  x = y + attention(y, x);  y = norm2(x);  x = y + ffn(y)
        ffn(x) = linear2(activation(linear1(x)))

    Args:
        embedding_dim: width E of the rows; a multiple of num_heads.
        num_heads: attention heads.
        ffn_dim: width of the feed-forward network.
        norm_first: norms before the attention and the feed-forward network, not after the
            residuals; "queries": as SASRec (Kang & McAuley 2018) has them, whose keys and values
            are of rows without a norm, while the residuals are of those with it.
        norm: "layer" or "rms".
        activation: an activation of `functional.jagged_attention` except softmax, or "swiglu"
            (Shazeer 2020), for which linear1 has 2 · ffn_dim outputs.
        mask: which rows each row sees; all of its segment if None.
        dropout: dropout probability, below 1: of the attention weights, within the feed-forward
            network, and of what is added to the rows, as of nn.TransformerEncoderLayer.
        norm_eps: added to the variance.
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.

    Raises:
        TypeError, ValueError: an argument has another type or is out of range; num_heads does not
            divide embedding_dim; the head dim is above 256.

    Example::

        layer = jm.JaggedEncoderLayer(32, num_heads=4, ffn_dim=64, norm_first=True)
        values, offsets = layer((torch.randn(5, 32), torch.tensor([0, 2, 5])))
    """

    _shown = "norm_first", "activation"

    def __init__(
        self,
        embedding_dim: int,
        num_heads: int,
        ffn_dim: int,
        *,
        norm_first: bool | str = False,
        norm: str = "layer",
        activation: str = "relu",
        mask: AttentionMask | None = None,
        dropout: float = 0,
        norm_eps: float = 1e-5,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(dtype)
        check_size("ffn_dim", ffn_dim)
        if norm_first != QUERIES:
            check_kind("norm_first", norm_first, bool, f"a bool or {QUERIES!r}")
        check_choice("norm", norm, tuple(NORMS))
        check_choice("activation", activation, (*POINTWISE, "swiglu"))
        check_dropout("dropout", dropout)
        check_number("norm_eps", norm_eps, 0)
        self.embedding_dim, self.num_heads, self.ffn_dim = embedding_dim, num_heads, ffn_dim
        self.norm_first, self.activation = norm_first, activation
        where: dict[str, Any] = dict(device=device, dtype=dtype)
        config = GDPAConfig(attention_dropout=dropout)
        self.attention = JaggedGDPA(embedding_dim, num_heads, "softmax", mask, config, **where)
        inner = 2 * ffn_dim if activation == "swiglu" else ffn_dim
        self.linear1 = nn.Linear(embedding_dim, inner, **where)
        self.linear2 = nn.Linear(ffn_dim, embedding_dim, **where)
        self.norm1, self.norm2 = (
            NORMS[norm](embedding_dim, eps=norm_eps, **where) for _ in range(2)
        )
        self.dropout = nn.Dropout(dropout)

    @classmethod
    def from_torch(
        cls, module: nn.TransformerEncoderLayer, mask: AttentionMask | None = None
    ) -> Self:
        """A layer with the weights of an nn.TransformerEncoderLayer, in its mode, on its device. In
        eval mode its results are those of the module's real rows. In training, its dropout draws
        other random numbers. The layer is frozen if the module is.

        Args:
            module: with an activation that the constructor has. A bias that it does not have is one
                of 0 here.
            mask: which the module is given in its calls, as `AttentionMask(causal=True)`.

        Raises:
            TypeError, ValueError: another kind of module, or options that this layer does not have.
        """
        check_torchs(module, nn.TransformerEncoderLayer)
        own: Any = module
        dropouts = [own.self_attn.dropout, own.dropout.p, own.dropout1.p, own.dropout2.p]
        if len({*dropouts}) > 1:
            raise ValueError(
                "module's self_attn, dropout, dropout1 and dropout2 must have one probability, got"
                f" {dropouts}"
            )
        return cls.from_parts(
            module.self_attn,
            (module.linear1, module.linear2),
            (module.norm1, module.norm2),
            norm_first=module.norm_first,
            activation=activation_of("module's activation", module.activation),
            mask=mask,
            dropout=module.dropout.p,
        ).train(module.training)

    @classmethod
    def from_parts(
        cls,
        attention: nn.Module | Sequence[nn.Module],
        linears: Sequence[nn.Module],
        norms: Sequence[nn.Module],
        *,
        num_heads: int | None = None,
        norm_first: bool | str = False,
        activation: str | Callable[[Tensor], Tensor] = "relu",
        mask: AttentionMask | None = None,
        dropout: float | None = None,
    ) -> Self:
        """A layer with the weights of the modules of an encoder layer that is not torch's, in their
        mode, on their device, frozen if all of them are.

        Args:
            attention: an nn.MultiheadAttention, or linears: of queries, keys and values in this
                order, each one or several in one, and of the output, nn.Identity() if there is
                none. Then the weight of out_proj is the identity, and is not trained.
            linears: linear1 and linear2, each an nn.Linear, an nn.Conv1d with kernel_size 1 or a
                module that computes the same of its weight, transposed or not, and its bias.
                linear1 may be several, whose outputs are one after another: gate and values of
                "swiglu".
            norms: norm1 and norm2: two nn.LayerNorm or nn.RMSNorm, or modules that compute the
                same, with one eps. Other modules that compute each row by itself are copied and
                called.
            num_heads: attention heads, of linears.
            norm_first, mask: as of the constructor.
            dropout: as of the constructor; if None, that of an nn.MultiheadAttention, or 0.
            activation: as of the constructor, or a function or module with these values.

        Raises:
            TypeError, ValueError: as the constructor; modules of another kind, or with options that
                this layer does not have.

        Example::

            linear, norm = torch.nn.Linear, torch.nn.LayerNorm(32)
            projections, ffn = [linear(32, 32) for _ in "qkvo"], (linear(32, 64), linear(64, 32))
            layer = jm.JaggedEncoderLayer.from_parts(projections, ffn, (norm, norm), num_heads=4)
        """
        if isinstance(attention, nn.Module):
            module = checked_attention(attention)
            num_heads = int(module.num_heads)
            dropout = float(module.dropout) if dropout is None else dropout
        elif not 2 <= len(attention) <= 4 or num_heads is None:
            raise ValueError(
                "attention must be an nn.MultiheadAttention, or two to four linears with num_heads,"
                f" got {len(attention)} modules and num_heads {num_heads}"
            )
        if not isinstance(activation, str):
            activation = activation_of("activation", activation)
        *ups, down = (linear_of(f"linears[{i}]", linear) for i, linear in enumerate(linears))
        up, up_bias = joined(ups)
        own_norms = [torch_norm(f"norm{i}", norm, up.shape[1]) for i, norm in enumerate(norms, 1)]
        options = norm_of(own_norms)
        layer = cls(
            up.shape[1],
            num_heads,
            down[0].shape[1],
            norm_first=norm_first,
            activation=activation,
            mask=mask,
            dropout=dropout or 0,
            **options,
            **place(linears[0]),
        )
        if isinstance(attention, nn.Module):
            load_attention(layer.attention, attention)
        else:
            load_projections(layer.attention, attention)
        load(layer.linear1, up, up_bias)
        load(layer.linear2, *down)
        if options:
            for own, given in zip((layer.norm1, layer.norm2), own_norms):
                load_norm(own, given)
        else:
            layer.norm1, layer.norm2 = (copy.deepcopy(norm) for norm in own_norms)
        parts = [attention] if isinstance(attention, nn.Module) else attention
        return like(layer, *linears, *parts, *norms)

    @fixed_module
    def forward(self, x: C, num_targets: Tensor | None = None) -> C:
        """Update all rows.

        Args:
            x: any container of `[L, E]` values in B segments.
            num_targets: as in `JaggedGDPA.forward`.

        Returns:
            x's kind of container, with `[L, E]` values.

        Raises:
            TypeError, ValueError: as `JaggedGDPA.forward`.
        """
        jagged = wrap_rows("x", x, self.embedding_dim, self.linear1)
        dtype = encoder_dtype(self, jagged.values)
        if dtype is not None:
            return jagged.unwrap(encoder_node(self, jagged, num_targets, dtype))
        end = jagged.end("x")
        rows = entering(jagged.values, end)
        if self.norm_first == QUERIES:
            normed = self.norm1(rows)
            rows = normed + self.dropout(self._attended(jagged, normed, num_targets, rows))
            normed = self.norm2(rows)
            rows = normed + self.dropout(self._ffn(normed))
        elif self.norm_first:
            rows = rows + self.dropout(self._attended(jagged, self.norm1(rows), num_targets))
            rows = rows + self.dropout(self._ffn(self.norm2(rows)))
        else:
            rows = self.norm1(rows + self.dropout(self._attended(jagged, rows, num_targets)))
            rows = self.norm2(rows + self.dropout(self._ffn(rows)))
        return jagged.unwrap(leaving(rows, end))

    def _attended(
        self,
        jagged: Jagged,
        rows: Tensor,
        num_targets: Tensor | None,
        context: Tensor | None = None,
    ) -> Tensor:
        def clean(values: Tensor) -> Jagged:
            own = jagged.with_values(values)
            own.is_clean = True  # forward sees to the rows behind the end
            return own

        keys = None if context is None else clean(context)
        return self.attention(clean(rows), keys, num_targets).values

    def _ffn(self, rows: Tensor) -> Tensor:
        activation = activation_of_rows(self.activation)
        return self.linear2(self.dropout(activation(self.linear1(rows))))


class JaggedEncoder(Layer):
    """A stack of encoder layers, and a norm of its result.

    Args:
        layers: the `JaggedEncoderLayer`s, one or more.
        norm: a module of rows, or None.

    Raises:
        TypeError, ValueError: there is no layer, or one of another kind.

    Example::

        layers = [jm.JaggedEncoderLayer(32, num_heads=4, ffn_dim=64) for _ in range(2)]
        values, offsets = jm.JaggedEncoder(layers)((torch.randn(5, 32), torch.tensor([0, 2, 5])))
    """

    def __init__(self, layers: Sequence[JaggedEncoderLayer], norm: nn.Module | None = None) -> None:
        super().__init__()
        if not layers:
            raise ValueError("layers must have one layer or more, got none")
        for i, layer in enumerate(layers):
            check_kind(f"layers[{i}]", layer, JaggedEncoderLayer, "a JaggedEncoderLayer")
        self.layers = nn.ModuleList(layers)
        self.norm = norm

    @classmethod
    def from_torch(cls, module: nn.TransformerEncoder, mask: AttentionMask | None = None) -> Self:
        """A stack with the weights of an nn.TransformerEncoder, as `JaggedEncoderLayer.from_torch`.

        Args:
            module: with a norm of rows or none. A layer that occurs several times does so here.
            mask: of all layers.

        Raises:
            TypeError, ValueError: as `JaggedEncoderLayer.from_torch`.
        """
        check_torchs(module, nn.TransformerEncoder)
        layers: list[Any] = list(module.layers)
        own = {layer: JaggedEncoderLayer.from_torch(layer, mask) for layer in dict.fromkeys(layers)}
        encoder = cls([own[layer] for layer in layers], copy.deepcopy(module.norm))
        return encoder.train(module.training)

    @fixed_module
    def forward(self, x: C, num_targets: Tensor | None = None) -> C:
        """Update all rows by each layer.

        Args:
            x, num_targets: as in `JaggedEncoderLayer.forward`.

        Returns:
            x's kind of container, with `[L, E]` values.

        Raises:
            TypeError, ValueError: as `JaggedEncoderLayer.forward`.
        """
        first: Any = self.layers[0]
        jagged = wrap_rows("x", x, first.embedding_dim, first.linear1)
        rows = jagged.with_values(jagged.values)
        for layer in self.layers:
            rows = layer(rows, num_targets)
        if self.norm is None:
            return jagged.unwrap(rows.values)
        return jagged.unwrap(leaving(self.norm(rows.values), jagged.end("x")))
