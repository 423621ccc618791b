"""The triton operators inside torch.compile's and torch.export's graphs, whose launches the
interpreter runs."""

import torch
from marks import slow_after

import jagged_modules as jm
from jagged_modules import functional as F


class CrossAttention(torch.nn.Module):
    def __init__(self, masked=False):
        super().__init__()
        self.projection, self.masked = torch.nn.Linear(16, 48), masked

    def forward(self, x, x_offsets, y, y_offsets):
        q = self.projection(x)[:, :16].unflatten(1, (2, 8))
        k, v = self.projection(y)[:, 16:].unflatten(1, (2, 2, 8)).unbind(1)
        options = {}
        if self.masked:
            mask = jm.AttentionMask(causal=True, num_targets=y_offsets.diff() // 3)
            options = dict(
                mask=mask, activation="silu", output_scale=1 / (1 + x_offsets.diff().float())
            )
        return F.jagged_attention(q, k, v, x_offsets, y_offsets, implementation="triton", **options)


def batches(offsets):
    for q_lengths, kv_lengths in (
        ([5, 3, 4], [6, 6, 8]),
        ([5, 2], [6, 3]),
        ([0, 9, 1, 1], [2, 70, 0, 3]),
    ):
        yield (
            torch.randn(sum(q_lengths), 16),
            offsets(q_lengths),
            torch.randn(sum(kv_lengths), 16),
            offsets(kv_lengths),
        )


@slow_after(1, "masked", [False, True], ids=["softmax", "silu-masked"])
def test_compiled_without_recompiling_per_batch(offsets, masked):
    model = CrossAttention(masked)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    for number, batch in enumerate(batches(offsets)):
        with torch._dynamo.config.patch(error_on_recompile=number > 0):
            out = compiled(*batch)
        assert torch.equal(out, model(*batch))
        gradients = [
            torch.autograd.grad(x.sum(), model.projection.weight)[0] for x in (out, model(*batch))
        ]
        assert torch.equal(*gradients)


def test_exported_with_every_size_dynamic(offsets):
    model, (example, *others) = CrossAttention(), batches(offsets)
    rows, keys, segments = (torch.export.Dim(name, min=2) for name in ("rows", "keys", "segments"))
    exported = torch.export.export(
        model, example, dynamic_shapes=({0: rows}, {0: segments}, {0: keys}, {0: segments})
    ).module()
    for batch in others:
        assert torch.equal(exported(*batch), model(*batch))
