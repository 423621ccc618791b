"""Items that attend to the histories of their user and of their vendor, with one softmax over both.

    python kernels/benchmarks/bench_levels.py                # on a CUDA device, bf16
    python kernels/benchmarks/bench_levels.py --device cpu   # fp32
    python kernels/benchmarks/bench_levels.py --tiny --device cpu

Lengths are lognormal. The materialising forms copy both histories for each item: as jagged rows,
which our kernels read, or padded to the longest of both, which torch's fused attention reads.
TFLOP/s count 4 · H · D for each pair of an item and an event, and 2.5 times that in the backward.
Speed-ups are over the padded form.
"""

import dataclasses
import sys
from functools import partial

import torch
from inputs import ATTAINABLE, leaves, lognormal_lengths, offsets_of, random_tensors
from names import DENSE_FLASH, OURS
from runner import Case, Implementation, Setup, device_name, main
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

import jagged_modules as jm
from jagged_modules import functional as F

COPIES = f"{OURS}, a copy for each item"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Users and vendors with their histories' mean lengths, items, heads and head dim."""

    users: int
    of_user: int
    vendors: int
    of_vendor: int
    items: int
    heads: int = 4
    dim: int = 64

    @property
    def name(self) -> str:
        return (
            f"{self.users} users of {self.of_user} events, {self.vendors} vendors of"
            f" {self.of_vendor}, {self.items} items"
        )


class Problem:
    """Inputs of one case, and its definition."""

    def __init__(self, device: str, dtype: torch.dtype, sizes: Sizes):
        self.sizes, self.device = sizes, device
        generator = torch.Generator().manual_seed(0)
        means = (sizes.users, sizes.of_user), (sizes.vendors, sizes.of_vendor)
        lengths = [lognormal_lengths(count, mean, 4 * mean, 1.0) for count, mean in means]
        vendors = torch.randint(sizes.vendors, (sizes.items,), generator=generator)
        users = torch.randint(sizes.users, (sizes.vendors,), generator=generator)[vendors]
        maps = users, vendors
        self.candidates = tuple(
            jm.CandidateIndex.from_map(x.to(device), len(n)) for x, n in zip(maps, lengths)
        )
        self.offsets = [offsets_of(x).to(device) for x in lengths]
        rows = [int(x.sum()) for x in lengths]
        heads = sizes.heads, sizes.dim
        shapes = [(sizes.items, 1, *heads), *((n, *heads) for n in rows for _ in "kv")]
        names = "q", "k_user", "v_user", "k_vendor", "v_vendor"
        self.inputs = leaves(**dict(zip(names, random_tensors(device, dtype, *shapes))))
        (self.grad,) = random_tensors(device, dtype, shapes[0])
        # the keys of each item, in the rows of users' and then of vendors' histories
        own = [x[index] for x, index in zip(lengths, maps)]
        starts = [offsets_of(x)[index] for x, index in zip(lengths, maps)]
        places, hidden = [], []
        for length, start, first in zip(own, starts, (0, rows[0])):
            within = torch.arange(int(length.max()))
            hidden.append(within >= length[:, None])
            places.append((first + start[:, None] + within).masked_fill(hidden[-1], 0))
        hidden, places = torch.cat(hidden, 1), torch.cat(places, 1)
        self.pairs = int(sum(x.sum() for x in own))
        self.seen, self.places = ~hidden.to(device), places.to(device)
        self.flat = places[~hidden].to(device)
        self.ends = offsets_of(own[0] + own[1]).to(device)

    def copies(self, rows: Tensor, *histories: Tensor) -> Tensor:
        """An embedding's gradient is a sum in fp32, that of index_select one in bf16."""
        joined = torch.cat(histories)
        return embedding(rows, joined.flatten(1)).unflatten(-1, joined.shape[1:])

    def padded(self, q, k_user, v_user, k_vendor, v_vendor, items=slice(None)) -> Tensor:
        places = self.places[items]
        k, v = self.copies(places, k_user, k_vendor), self.copies(places, v_user, v_vendor)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        mask = self.seen[items, None, None]
        return scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    def copied(self, q, k_user, v_user, k_vendor, v_vendor) -> Tensor:
        k, v = self.copies(self.flat, k_user, k_vendor), self.copies(self.flat, v_user, v_vendor)
        queries = torch.arange(len(q) + 1, device=q.device)
        return F.jagged_attention(q[:, 0], k, v, queries, self.ends)[:, None]

    def ours(self, q, k_user, v_user, k_vendor, v_vendor) -> Tensor:
        keys, values = (k_user, k_vendor), (v_user, v_vendor)
        return F.target_attention(q, keys, values, self.candidates, self.offsets)

    def reference(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """Of some items at a time: a copy for each takes much memory."""
        inputs = [x.detach().to(dtype).requires_grad_() for x in self.inputs.values()]
        names = "out", *(f"d{name}" for name in self.inputs)
        totals = [torch.zeros_like(x, dtype=torch.float64) for x in (self.grad, *inputs)]
        for items in torch.arange(self.sizes.items, device=self.device).split(256):
            out = self.padded(inputs[0][items], *inputs[1:], items)
            totals[0][items] = out.detach().double()
            grads = torch.autograd.grad(out, inputs, self.grad[items].to(dtype))
            for total, x in zip(totals[1:], grads):
                total += x
        return {f"{name}/all": x for name, x in zip(names, totals)}

    def implementation(self, forward) -> Implementation:
        return Implementation(
            lambda: forward(**self.inputs), self.inputs, lambda _, x: {"all": x}, self.grad
        )

    def setup(self) -> Setup:
        flops = 4.0 * self.pairs * self.sizes.heads * self.sizes.dim
        read, out = sum(x.nbytes for x in self.inputs.values()), self.grad.nbytes
        forms = {OURS: self.ours, COPIES: self.copied, DENSE_FLASH: self.padded}
        return Setup(
            {name: partial(self.implementation, form) for name, form in forms.items()},
            self.reference,
            self.grad.dtype,
            flops=flops,
            backward_flops=2.5 * flops,
            bytes=read + out,
            backward_bytes=2 * read + out,
            attainable=ATTAINABLE.get(device_name(self.device)),
            baseline=DENSE_FLASH,
        )


FULL = Sizes(15, 400, 200, 60, 4096), Sizes(1, 1000, 10, 200, 10000)
CPU = (Sizes(15, 400, 200, 60, 1024),)
TINY = (Sizes(2, 6, 3, 4, 7, heads=2, dim=8),)


def make_cases(device: str, tiny: bool) -> list[Case]:
    """CUDA: bf16. CPU: fp32 and fewer items."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return [
        Case("levels", sizes.name, lambda sizes=sizes: Problem(device, dtype, sizes).setup())
        for sizes in (TINY if tiny else FULL if device == "cuda" else CPU)
    ]


if __name__ == "__main__":
    sys.exit(main("levels", make_cases))
