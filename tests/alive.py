"""What of a step's tensors exists at a time."""

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Alive(TorchDispatchMode):
    """Counts the storages that torch's operators have given and that are alive, in bytes for each
    of so many rows, a prime. Others are not of rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.storages: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for x in tree_leaves(results):
            if isinstance(x, torch.Tensor):
                reference = StorageWeakRef(x.untyped_storage())
                self.storages[reference.cdata] = reference
        return results

    def bytes_per_row(self) -> int:
        alive = map(torch.UntypedStorage._new_with_weak_ptr, self.storages)
        sizes = [x.nbytes() for x in alive if x is not None]
        return sum(n // self.rows for n in sizes if n % self.rows == 0)
