"""JaggedDINAttention: the history's events, weighted for each target by an MLP (DIN)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.types import Device

from ..containers.candidates import CandidateIndex
from ..containers.history_cache import HistoryCache
from ..containers.jagged import Jagged, wrap_rows
from ..dtypes import autocast
from ..functional.attention_arguments import check_mask
from ..functional.din_attention import DINMlp, attend_by_mlp, checked_features, event_part
from ..functional.operands import runs_kernels
from ..functional.tail import entering, leaving
from ..masks import AttentionMask, check_num_targets
from ..scalars import check_choice, check_flag, check_number, check_size, is_sequence
from ..settings import is_batch_invariant
from ..tracing import one_module, through_call
from ..unit_activations import UNIT_ACTIVATIONS, WITH_PARAMETERS, UnitParameters
from .cached_projections import CachesRows, layer_of_cache
from .din_weights import read_mlp
from .from_torch import like
from .one_node import has_call_of_its_own
from .parameters import name_keywords
from .targets import T, Targets, parse_targets


@name_keywords
class JaggedDINAttention(CachesRows):
    """Target attention of DIN (Zhou et al. 2018, arXiv:1706.06978): the weight of each event is an
    MLP's score of the features of target and event. No tensor has a row for each pair.

    The first linear is split, see `functional.din_attention`.

    Args:
        embedding_dim: width E of targets, history and output.
        hidden: units of the hidden layers. The kernels take one or two; for the sizes, see
            `functional.din_attention`.
        activation: of the hidden layers: "sigmoid", "dice", "prelu", "relu", "silu" or "identity".
        normalize: None: the weights are the scores, as published. "softmax": over the events.
        features: in the order of the first linear's columns: different ones of "q", "k", "q-k",
            "k-q" and "q*k".
        device, dtype: of the parameters; dtype is torch.get_default_dtype() if None.
        eps, momentum: of Dice's batch norm, see `from_torch` for those of other libraries.
        affine: whether this norm has weights and biases.
        mask: which events each target sees; all if None. The targets of a user are the last rows of
            the history, see `functional.din_attention`.

    Raises:
        TypeError, ValueError: a size is not a positive integer; an unknown name; eps is negative,
            or momentum not in 0 to 1; affine is no bool; the dtype is not a floating-point one.

    Example::

        attention = jm.JaggedDINAttention(embedding_dim=32, hidden=(80, 40), activation="dice")
        history = (torch.randn(5, 32), torch.tensor([0, 2, 5]))  # two users with 2 and 3 items
        candidates = jm.CandidateIndex.from_counts(torch.tensor([3, 1]))  # 3 and 1 candidates
        out = attention(torch.randn(4, 1, 32), history, candidates)  # [4, 1, 32]
    """

    _shown = "embedding_dim", "hidden", "activation", "normalize", "features", "mask"

    def __init__(
        self,
        embedding_dim: int,
        hidden: Sequence[int] = (80, 40),
        activation: str = "sigmoid",
        normalize: str | None = None,
        features: Sequence[str] = ("q", "k", "q-k", "q*k"),
        device: Device = None,
        dtype: torch.dtype | None = None,
        *,
        eps: float = 1e-8,
        momentum: float = 0.1,
        affine: bool = False,
        mask: AttentionMask | None = None,
    ) -> None:
        super().__init__(dtype)
        check_size("embedding_dim", embedding_dim)
        if not is_sequence(hidden) or not hidden:
            raise TypeError(f"hidden must be a tuple of at least one size, got {hidden!r}")
        for size in hidden:
            check_size("hidden", size)
        check_choice("activation", activation, UNIT_ACTIVATIONS)
        check_choice("normalize", normalize, (None, "softmax"))
        check_number("eps", eps, low=0)
        check_number("momentum", momentum, 0, 1)
        check_flag("affine", affine)
        check_mask(mask)
        self.embedding_dim, self.hidden = embedding_dim, tuple(hidden)
        self.activation, self.normalize = activation, normalize
        self.features, self.mask = checked_features(features), mask
        sizes = [len(self.features) * embedding_dim, *hidden, 1]
        self.linears = nn.ModuleList(
            nn.Linear(before, size, device=device, dtype=dtype)
            for before, size in zip(sizes, sizes[1:])
        )
        norm = (eps, momentum, affine) if activation == "dice" else None
        self.units = nn.ModuleList(
            HiddenUnits(size, norm, device, dtype)
            for size in hidden
            if activation in WITH_PARAMETERS
        )

    @classmethod
    def from_torch(
        cls, mlp: nn.Module, normalize: str | None = None, mask: AttentionMask | None = None
    ) -> JaggedDINAttention:
        """The layer with the weights of a trained attention MLP, a copy of them, in the mode of its
        linears, frozen if the MLP is.

        Args:
            mlp: the module with the linears of the MLP and their activations: in order,
                `torch.nn.Linear` of 4 · E columns, the hidden ones, and one of a single row; and
                between them ReLU, Sigmoid, SiLU, Identity, PReLU, or a Dice. A Dice is a module
                with a `torch.nn.BatchNorm1d` named bn and a tensor named alpha. Dropout, which has
                no place here, is left out.

                The columns of the first linear are those of concat(q, k, q - k, q * k), as in
                TorchEasyRec (`torch.nn.ModuleList([encoder.mlp, encoder.linear])` of a
                `DINEncoder`, normalize="softmax"), DeepCTR-Torch (a `LocalActivationUnit`) and
                FuxiCTR (`attention_layer` of a `DIN_Attention`; normalize="softmax" if
                use_softmax). Dice's norm has a weight and a bias in the first two. Its eps is 1e-5
                in TorchEasyRec, 1e-8 or 1e-9 in DeepCTR-Torch and 1e-9 in FuxiCTR, whose momentum
                is 0.01; they are taken from the module. In training, these libraries count padded
                pairs in Dice's statistics; this layer counts real ones.
            normalize, mask: as of the constructor.

        Raises:
            ValueError: the module has other layers, such as a batch norm outside of Dice, different
                activations, linears without bias or of another class, hooks, or sizes that do not
                fit.
        """
        found = read_mlp(mlp)
        first = found.linears[0].weight
        layer = cls(
            first.shape[1] // 4,
            tuple(x.out_features for x in found.linears[:-1]),
            found.activation,
            normalize,
            device=first.device,
            dtype=first.dtype,
            mask=mask,
            **found.norm,
        )
        layer.load_state_dict(found.state_dict())
        return like(layer, found.linears[0], mlp)

    append_reads_cache = False  # for PagedHistoryCache

    @through_call
    def score(
        self, targets: T, cache: HistoryCache, candidates: CandidateIndex | Tensor | None = None
    ) -> T:
        """`forward(targets, history, candidates)` for cached histories.

        Args:
            targets, candidates: as in `forward`.
            cache: the result of `cache` for the histories, or of `PagedHistoryCache.select`. It is
                valid until the parameters change.

        Returns:
            As `forward`.

        Raises:
            TypeError, ValueError: as `forward`; the cache does not fit the layer.
        """
        history = self._layer_of(cache, "targets", None)
        given = self._parsed(targets, candidates, "cache", history)
        k, b = torch.split(history.values.squeeze(1), [self.embedding_dim, self.hidden[0]], 1)
        return self._attend(given, k, b)

    @one_module
    def forward(
        self, targets: T, history: Any, candidates: CandidateIndex | Tensor | None = None
    ) -> T:
        """The weighted sum of the events of each target's user.

        Args:
            targets: one of: a dense tensor `[B, T, E]`, T targets for each of B users; any
                container of `[N, E]` values in B segments; with `candidates`, a dense tensor
                `[num_candidates, n_q, E]`, n_q query rows for each candidate.
            history: any container of `[L, E]` values in B segments, one per user.
            candidates: the user of each candidate: a `CandidateIndex`, which several layers may
                share, or `[num_candidates]` int32 or int64 in any order.

        Returns:
            `[B, T, E]`, the targets' kind of container with `[N, E]` values, or
            `[num_candidates, n_q, E]`, as targets are. 0 for a target that sees no event.

        Raises:
            TypeError, ValueError: types, shapes, dtypes, devices or numbers of segments do not
                match; the message names the argument. On a GPU, also sizes that the kernels do not
                take.
        """
        jagged = self._wrapped("history", history)
        given = self._parsed(targets, candidates, "history", jagged)
        k = autocast(jagged.values)
        if not runs_kernels("auto", k):  # they read no rows behind the end
            k = entering(k, given.levels[0].end)
        return self._attend(given, k, None)

    def _wrapped(self, name: str, x: Any) -> Jagged:
        return wrap_rows(name, x, self.embedding_dim, self.linears[0], "din_attention")

    def _parsed(self, targets: Any, candidates: Any, name: str, history: Jagged) -> Targets:
        """Targets of the history, which errors call `name`."""
        projection = self.linears[0]
        return parse_targets(targets, candidates, {name: history}, projection, self.embedding_dim)

    def _layer_of(self, cache: HistoryCache, name: str, x: Jagged | None) -> Jagged:
        width = self.embedding_dim + self.hidden[0]
        return layer_of_cache(cache, name, x, 1, width, self.linears[0])

    def _kept(self, rows: Tensor) -> Tensor:
        k = autocast(rows)
        return torch.cat([k, event_part(k, self._mlp())], 1).unsqueeze(1)

    def _attend(self, given: Targets, k: Tensor, b: Tensor | None) -> Any:
        (level,) = given.levels
        if self.mask is not None:
            num_targets, offsets = self.mask.num_targets, level.keys.offsets
            check_num_targets("mask.num_targets", num_targets, offsets, k.device, "the layer's")
        kernels = runs_kernels("auto", k)
        if is_batch_invariant() and not kernels:
            raise ValueError("JaggedDINAttention has no batch-invariant form on the CPU")
        q = level.grouped(entering(autocast(given.rows), given.end))
        self._count_batch()
        out = attend_by_mlp(q, k, k, b, level.queries, level.keys, self._mlp(), kernels, self.mask)
        return given.unwrap(leaving(level.ungrouped(out), given.end))

    def _mlp(self) -> DINMlp:
        linears: Any = self.linears
        kinds: list[Any] = [type(x) for x in linears]
        weights = [getattr(x, "weight", None) for x in linears]
        distributed = sys.modules.get("torch.distributed.tensor")
        sharded = () if distributed is None else distributed.DTensor
        if any(
            not isinstance(weight, Tensor)
            or isinstance(weight, sharded)
            or kind.forward is not nn.Linear.forward
            or has_call_of_its_own(linear)
            for linear, kind, weight in zip(linears, kinds, weights)
        ):
            raise TypeError(
                "the layer computes from the weights of its linears, which must be torch.nn.Linear"
                " with whole weights, without hooks or a forward of their own, got"
                f" {[(x.__name__, type(y).__name__) for x, y in zip(kinds, weights)]}"
            )
        return DINMlp(
            [autocast(x.weight) for x in linears], [autocast(x.bias) for x in linears],
            self.activation, self.normalize, self.features, self._unit_parameters(),
        )  # fmt: skip

    def _unit_parameters(self) -> UnitParameters | None:
        if self.activation not in WITH_PARAMETERS:
            return None
        units: Any = self.units
        slopes = [x.slope for x in units]
        if self.activation == "prelu":
            return UnitParameters(slopes)
        norms = [x.norm for x in units]
        affine, training, momentum = norms[0].affine, norms[0].training, norms[0].momentum
        if momentum is None:  # the mean of all batches, as in torch.optim.swa_utils.update_bn
            momentum = 1 / norms[0].num_batches_tracked
        return UnitParameters(
            slopes, [x.weight for x in norms] if affine else None,
            [x.bias for x in norms] if affine else None, [x.running_mean for x in norms],
            [x.running_var for x in norms], training, momentum, norms[0].eps,
        )  # fmt: skip

    def _count_batch(self) -> None:
        """What a batch norm in training counts. Raises unless the norms are in one mode, and in
        training of this process alone."""
        units: Any = self.units
        norms = [x.norm for x in units if x.norm is not None]
        modes = [x.training for x in norms]
        if len(set(modes)) > 1:
            raise ValueError(
                f"the layer's norms must be all in training or all in eval mode, got {modes}"
            )
        if not any(modes):
            return
        if not all(isinstance(x, nn.BatchNorm1d) for x in norms):
            raise TypeError(
                "in training the layer's norms must be torch.nn.BatchNorm1d, of statistics of this"
                f" process alone, got {[type(x).__name__ for x in norms]}"
            )
        for norm in norms:
            norm.num_batches_tracked.add_(1)


class HiddenUnits(nn.Module):
    """Parameters of the activation of a layer's units: slopes of PReLU, or alpha and batch norm of
    Dice. size: units. norm: eps, momentum and affine of Dice's batch norm; None: PReLU."""

    def __init__(
        self,
        size: int,
        norm: tuple[float, float, bool] | None,
        device: Device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.norm = norm and nn.BatchNorm1d(size, *norm, device=device, dtype=dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """PReLU's slopes are 0.25, as torch's; Dice's alpha is 0."""
        nn.init.constant_(self.slope, 0.25 if self.norm is None else 0.0)
        if self.norm is not None:
            self.norm.reset_parameters()
