"""How much memory a backward may take for being faster."""

from __future__ import annotations

from jagged_kernels import launch

from .checks import check_size


class backward_workspace:
    """Bytes that the backward of attention may take, above its gradients, while it runs; None, the default: as many as pay.

    On a GPU of compute capability 9.0, with head dims above 64 and no mask, it keeps the gradients of the scores, two bytes for each pair
    of a query and a key, where it otherwise computes the scores twice: up to 2 GiB or the gradients' size, whichever is larger.

    Args:
        num_bytes: from now on.

    Raises:
        TypeError, ValueError: num_bytes that is no int, or negative.

    Example::

        jm.backward_workspace(0)                 # from here on: none
        with jm.backward_workspace(2**28): ...   # or for a block, in which the backward runs
    """

    def __init__(self, num_bytes: int | None) -> None:
        if num_bytes is not None:
            check_size("num_bytes", num_bytes, at_least=0)
        self.before, launch.backward_workspace = launch.backward_workspace, num_bytes

    def __enter__(self) -> backward_workspace:
        return self

    def __exit__(self, *_) -> None:
        launch.backward_workspace = self.before
