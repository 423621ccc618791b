"""torch.export of models whose inputs are tensors, with every size dynamic."""

import torch

import jagged_modules as jm
from jagged_modules import functional as F

from .graph_cases import DIM, HEADS, SIZES, WIDTH, compress_inputs, random_offsets, random_targets


class Compressor(torch.nn.Module):
    """Three levels, the users' by a CandidateIndex made in the graph."""

    def __init__(self):
        super().__init__()
        self.compress = jm.LinearCompressEmbedding(10, 4, (9, 8))

    def forward(self, candidates, shared, vendors, users_of, vendors_of):
        index = jm.CandidateIndex.from_map(users_of, shared.shape[0])
        return self.compress(candidates, [shared, vendors], [index, vendors_of])


def test_export_of_linear_compress_with_all_batch_sizes_dynamic():
    model = Compressor()
    count, users, vendors = (torch.export.Dim(name) for name in ("count", "users", "vendors"))
    shapes = dict(
        candidates={0: count},
        shared={0: users},
        vendors={0: vendors},
        users_of={0: count},
        vendors_of={0: count},
    )
    exported = torch.export.export(
        model, compress_inputs(*SIZES[0]), dynamic_shapes=shapes
    ).module()
    for sizes in [*SIZES, (2, 0, 400)]:
        inputs = compress_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), model(*inputs))


class Scorer(torch.nn.Module):
    """HSTU's attention: the mask is made of an input."""

    def forward(self, x, offsets, num_targets, output_scale):
        mask = jm.AttentionMask(causal=True, num_targets=num_targets)
        return F.jagged_attention(
            x, x, x, offsets, mask=mask, activation="silu", output_scale=output_scale
        )


def scorer_inputs(users, rows, _):
    offsets = random_offsets(users, rows)
    return torch.randn(rows, HEADS, DIM), offsets, random_targets(offsets), torch.rand(users)


def test_export_of_masked_attention():
    users, rows = torch.export.Dim("users"), torch.export.Dim("rows")
    shapes = dict(
        x={0: rows}, offsets={0: users + 1}, num_targets={0: users}, output_scale={0: users}
    )
    exported = torch.export.export(
        Scorer(), scorer_inputs(*SIZES[0]), dynamic_shapes=shapes
    ).module()
    for sizes in SIZES:
        inputs = scorer_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), Scorer()(*inputs))


class BlockEncoder(torch.nn.Module):
    """The function with given positions, then the layer with its own."""

    def __init__(self):
        super().__init__()
        self.attention = jm.BlockDiagonalSelfAttention(
            WIDTH, HEADS, block_size=16, rotary="qkv", max_seqlen=1000
        )
        self.tables = jm.Rotary.from_frequencies(DIM, 1000)

    def forward(self, x, offsets, positions):
        heads = x.unflatten(1, (HEADS, DIM))
        rotary = jm.Rotary(self.tables.cos, self.tables.sin, positions=positions)
        out = F.block_diagonal_attention(heads, heads, heads, offsets, block_size=32, rotary=rotary)
        return self.attention((out.flatten(1), offsets))[0]


def encoder_inputs(users, rows, _):
    return torch.randn(rows, WIDTH), random_offsets(users, rows), torch.randint(1000, (rows,))


def test_export_of_block_diagonal_attention():
    model = BlockEncoder()
    rows = torch.export.Dim("rows")
    boundaries = torch.export.Dim("boundaries")
    shapes = dict(x={0: rows}, offsets={0: boundaries}, positions={0: rows})
    exported = torch.export.export(model, encoder_inputs(*SIZES[0]), dynamic_shapes=shapes).module()
    for sizes in [*SIZES, (2, 700, 0)]:
        inputs = encoder_inputs(*sizes)
        torch.testing.assert_close(exported(*inputs), model(*inputs))
