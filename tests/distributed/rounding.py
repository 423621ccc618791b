"""How far two ways to compute the same training steps may differ."""

from collections.abc import Collection

import torch


def assert_trained_alike(
    actual: dict, expected: dict, initial: dict, steps: int, slow: Collection[str] = ()
) -> None:
    """Weights after `steps` steps, by name. Both ways sum the same terms in another order.

    A step rounds a weight once, and the gradient that it adds has gone through a chain of about
    twenty layers, whose roundings add up to about their square root. That makes eight roundings per
    step, of the largest weight or change. A missing or misscaled gradient is an error of the size
    of the change, which must exceed the bound, except of weights named in `slow`.
    """
    for name, x in expected.items():
        changed = (x - initial[name]).abs().max()
        bound = 8 * steps * 2**-24 * torch.maximum(x.abs().max(), changed)
        error = (actual[name] - x).abs().max()
        assert error <= bound, f"{name}: {error} > {bound}"
        assert changed > bound or name in slow, f"{name}: changed by {changed} <= {bound}"
