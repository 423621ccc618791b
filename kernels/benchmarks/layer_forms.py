"""Ways to compute a layer, as `bench_layers.py` measures them."""

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial

import torch
from inputs import leaves, pad
from runner import Implementation
from torch import Tensor, nn


@dataclasses.dataclass(frozen=True)
class Form:
    """One way to compute a layer.

    Args:
        call: the result, from the case's inputs.
        parameters: by their names in this project's layer.
        dtype: of the rows and of the result.
        autocast: whether it runs under the case's autocast.
        layout: ``layout(name, x)`` brings a result or a gradient into our layout.
        bound: as in Implementation.
        valid: `[B, N]`, of a form that takes padded rows: which are rows of segments. They are
            padded before the measured call.
    """

    call: Callable[..., Tensor]
    parameters: Mapping[str, nn.Parameter]
    dtype: torch.dtype = torch.float32
    autocast: bool = True
    layout: Callable[[str, Tensor], Tensor] = lambda name, x: x
    bound: float | None = None
    valid: Tensor | None = None

    def implementation(
        self, inputs: Mapping[str, Tensor], grad: Tensor, autocast: Callable
    ) -> Implementation:
        if self.valid is not None:
            inputs = {name: pad(x.detach(), self.valid) for name, x in inputs.items()}
            grad = pad(grad, self.valid)
        x = leaves(**{name: tensor.to(self.dtype) for name, tensor in inputs.items()})
        around = autocast if self.autocast else contextlib.nullcontext

        def forward() -> Tensor:
            with around():
                return self.call(*x.values())

        return Implementation(
            forward,
            x | {name.replace(".", "_"): x for name, x in self.parameters.items()},
            lambda name, result: {"all": self._rows(name, self.layout(name, result), *x)},
            grad.to(forward().dtype),  # that of the layer's GEMMs, if the layer ends with one
            bound=self.bound,
        )

    def _rows(self, name: str, result: Tensor, *inputs: str) -> Tensor:
        """Those of segments, of the result and of the gradients of inputs."""
        is_padded = self.valid is not None and name in ("out", *(f"d{x}" for x in inputs))
        return result[self.valid] if is_padded else result


def compiled(module: nn.Module, call: Callable[..., Tensor], **options) -> Form:
    """call: of the module and the inputs. options: of the Form."""
    run = torch.compile(module, dynamic=True)
    return Form(partial(call, run), dict(module.named_parameters()), **options)
