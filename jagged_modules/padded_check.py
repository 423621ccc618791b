"""What explains that a padded model and its jagged form differ."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .containers.jagged import Jagged
from .containers.padding import SIDES, real_places
from .scalars import check_choice, check_kind


@dataclasses.dataclass(frozen=True)
class PaddedComparison:
    """Largest absolute differences of results on one batch.

    Attributes:
        size: largest absolute result of the padded model.
        error: between the padded model and the jagged one.
        of_padding: of the padded model, if its padding holds other numbers: it reads them.
        of_width: if there is one more padded row: it divides by N, takes statistics of all rows, or
            counts positions from the left of padding on the left.
        of_side: if the padding is on the other side: it counts positions from the tensor's left, or
            takes the last of N rows.
    """

    size: float
    error: float
    of_padding: float
    of_width: float
    of_side: float

    def reasons(self, tolerance: float = 1e-5) -> list[str]:
        """What explains the error: the changes of the padding that change the padded model's
        results.

        Args:
            tolerance: the share of their size by which results change at least.
        """
        if not math.isfinite(self.size):
            return [
                "real rows are NaN or infinite: under a causal mask, left padding sees no key;"
                " let each row see itself"
            ]
        found = dict(
            of_padding="it reads the numbers in its padding: no mask in attention or pooling",
            of_width="it depends on the number of padded rows: a mean over N, statistics of rows,"
            " positions behind the padding",
            of_side="it depends on the padding's side: positions from the left, the row at N - 1",
        )
        limit = tolerance * max(self.size, 1e-30)
        return [text for name, text in found.items() if getattr(self, name) > limit]

    def __str__(self) -> str:
        lines = [f"largest difference {self.error:.3g} in results of up to {self.size:.3g}"]
        lines += [f"the padded model: {reason}" for reason in self.reasons()]
        if len(lines) == 1 and self.error > 1e-5 * self.size:
            lines.append("padding does not explain it: compare masks, positions and weights")
        return "\n".join(lines)


def compare_padded(
    padded: Callable[[Tensor, Tensor], Tensor],
    jagged: Callable[[Jagged], Any],
    x: Tensor,
    lengths: Tensor,
    side: str = "right",
) -> PaddedComparison:
    """Run a padded model and its jagged form on one batch, and the padded one with other padding,
    to find what makes them differ. Give both the same weights, in eval mode; in float64 equal
    models agree to about 1e-12.

    Args:
        padded: takes x, of N or N + 1 rows, and which are real, bool `[B, N]`; returns
            `[B, N, ...]`, of which real rows count, or `[B, ...]`.
        jagged: takes the rows as a `Jagged`; returns any container of as many rows, or `[B, ...]`.
        x: `[B, N, ...]`, floating-point.
        lengths: `[B]` int32 or int64, the real rows of each segment.
        side: of x's padding, "right" or "left".

    Returns:
        The comparison; print it.

    Raises:
        TypeError, ValueError: as `Jagged.from_padded`; results of other shapes, or that change from
            run to run, as dropout's do.

    Example::

        model = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        layer = jm.JaggedEncoderLayer.from_torch(model)
        x, lengths = torch.randn(3, 5, 16), torch.tensor([2, 5, 1])
        print(jm.compare_padded(lambda x, real: model(x), layer, x, lengths))  # it has no mask
    """
    check_choice("side", side, SIDES)
    rows = Jagged.from_padded(x, lengths, side=side)

    # a norm of a constant row is that of a row of zeros
    others = 3 * torch.arange(math.prod(x.shape[2:]), device=x.device).cos()
    others = others.to(x.dtype).view(x.shape[2:])

    def run(width: int, side: str, padding: Tensor | float = 0.0) -> Tensor:
        """The padded model's results that count."""
        real = real_places(lengths.to(x.device), width, side)
        places = real.view(*real.shape, *[1] * (x.ndim - 2))
        given = torch.where(places, rows.to_padded(width, side=side), padding)
        return _results(padded(given, real), real)

    def run_jagged() -> Tensor:
        out = jagged(rows)
        return out if isinstance(out, Tensor) else Jagged.wrap(out, name="jagged's result").values

    with torch.no_grad():
        width, (other,) = x.shape[1], set(SIDES) - {side}
        expected = _repeated("padded", lambda: run(width, side))
        own = _repeated("jagged", run_jagged)
        if own.shape != expected.shape:
            raise ValueError(
                f"both models must give results of one shape, {list(expected.shape)} of real rows,"
                f" got {list(own.shape)}"
            )
        try:
            wider = run(width + 1, side)
        except (IndexError, RuntimeError) as error:
            raise ValueError(
                f"padded must take one row more than x's N = {width}, got {error}: give x fewer"
                " rows than a table of positions has"
            ) from error
        differences = [
            _largest(found - expected)
            for found in (own, run(width, side, others), wider, run(width, other))
        ]
    return PaddedComparison(_largest(expected), *differences)


def _repeated(name: str, run: Callable[[], Tensor]) -> Tensor:
    """The results of a run. ValueError if those of another differ by more than rounding."""
    first, second = run(), run()
    if (change := _largest(second - first)) > 1e-2 * _largest(first):
        raise ValueError(
            f"{name} must give the same results twice, got a difference of {change:.3g}:"
            " call its model's eval()"
        )
    return first


def _results(out: Any, real: Tensor) -> Tensor:
    check_kind("padded's result", out, Tensor, "a torch.Tensor")
    return out[real] if out.shape[:2] == real.shape else out


def _largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
