"""Exports a ranking model as a package that programs in C++ load.

python export_model.py model.pt2
python export_model.py model.pt2 kernels/       # for CUDA, with its kernels
"""

import sys

import torch
from torch import Tensor, nn

import jagged_modules as jm
from jagged_modules.cpp_library import export_for_cuda, package

ITEMS, WIDTH, HEADS = 1000, 32, 2


class Ranker(nn.Module):
    """Scores `[candidates]` of items for users: HSTU encodes each history, and its events are
    weighted for each candidate."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, WIDTH)
        self.encoder = jm.HSTUStack(WIDTH, HEADS, 2, jm.HSTUConfig(scaling_seqlen=100))
        self.attention = jm.JaggedTargetAttention(WIDTH, HEADS)

    def forward(self, events: Tensor, offsets: Tensor, candidates: Tensor, users: Tensor) -> Tensor:
        """events: items of all histories. offsets: where each history begins, and their end.
        candidates, users: an item and the number of its user."""
        history = self.encoder(jm.Jagged(self.items(events), offsets))
        queries = self.items(candidates)
        return (self.attention(queries[:, None], history, users)[:, 0] * queries).sum(1)


def random_batch(users: int, events: int, candidates: int) -> tuple[Tensor, ...]:
    """Inputs of the model: histories of up to `events` each, and `candidates` of each user."""
    lengths = torch.randint(events + 1, (users,))
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
    of_users = torch.arange(users).repeat_interleave(candidates)
    items = torch.randint(ITEMS, (int(offsets[-1]),))
    return items, offsets, torch.randint(ITEMS, of_users.shape), of_users


def make() -> Ranker:
    """The model; trained weights would be loaded here."""
    torch.manual_seed(0)
    return Ranker().eval()


def export(path: str, kernels: str | None = None) -> None:
    """Writes the package, for any number of users, events and candidates; for CUDA with a folder
    of kernels."""
    events, users, candidates = (torch.export.Dim(x) for x in ("events", "users", "candidates"))
    shapes = {0: events}, {0: users + 1}, {0: candidates}, {0: candidates}
    model, batch = make(), random_batch(3, 50, 7)
    with torch.no_grad():
        if kernels is None:
            program = torch.export.export(model, batch, dynamic_shapes=shapes)
        else:
            batch = tuple(x.cuda() for x in batch)
            program = export_for_cuda(model.cuda(), batch, kernels, dynamic_shapes=shapes)
        package(program, path)


if __name__ == "__main__":
    export(*sys.argv[1:])
