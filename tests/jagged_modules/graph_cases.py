"""Inputs of the tests of torch.compile, torch.export and torch.fx, and compilation."""

import torch
from torch._dynamo.testing import CompileCounterWithBackend

HEADS, DIM, WIDTH = 2, 16, 32
# users, history rows, candidates; no two sizes of a batch equal
SIZES = [(5, 41, 11), (6, 83, 23), (7, 59, 37), (13, 14, 15)]


def compiled(function, floats_as_inputs=False):
    """The function compiled as one graph, and the counter of compilations.

    floats_as_inputs: torch's default, in which the first call compiles twice if a float of a
    module, such as nn.Dropout's p, is unused. All layers are compiled so in tests/compatibility.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    graph = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    return torch._dynamo.config.patch(specialize_float=not floats_as_inputs)(graph), counter


def random_offsets(segments: int, total: int) -> torch.Tensor:
    return torch.cat(
        [
            torch.zeros(1, dtype=torch.int64),
            torch.randint(total, (segments - 1,)).sort().values,
            torch.tensor([total]),
        ]
    )


def random_targets(offsets: torch.Tensor) -> torch.Tensor:
    return (torch.rand(len(offsets) - 1) * (offsets.diff() + 1)).long()


def compress_inputs(users, _, count):
    """Candidate embeddings, user embeddings and vendor embeddings for 3 users of each vendor, and
    the maps of users and vendors."""
    candidates = torch.randn(count, 10, WIDTH)
    shared = torch.randn(users, 9, WIDTH)
    vendors = torch.randn(3 * users, 8, WIDTH)
    return (
        candidates,
        shared,
        vendors,
        torch.randint(users, (count,)),
        torch.randint(3 * users, (count,)),
    )
