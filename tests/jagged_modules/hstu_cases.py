"""A padded HSTU in plain torch, and configurations, lengths and values for tests of HSTU."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as nnf

import jagged_modules as jm

WIDTH, HEADS, LAYERS = 8, 2, 3


# -- a padded HSTU in plain torch ------------------------------------------------------------------


def sees(i, j, n, t, config):
    """The published rule, for row i and column j of a segment of n rows, the last t of them
    targets."""
    c, last = config.contextual_seqlen, n - t
    last = last - c + 1 if c else last

    def identity(position):
        return min(max(position - c + 1, 0) if c else position, last)

    keep = i == j or identity(i) > identity(j)
    if config.max_attn_len:
        full = config.min_full_attn_seqlen > 0 and identity(i) >= last - config.min_full_attn_seqlen
        keep = keep and (identity(i) - identity(j) <= config.max_attn_len or full)
    if c:
        keep = keep or (identity(i) == 0 and identity(j) < last)
    first = n - t
    if config.recent_history:
        keep = keep and (j >= first - config.recent_history or i == j)
    keep = keep or j < min(config.global_prefix, first) and j <= i
    # the earlier targets of the group
    return (
        keep
        or first <= j <= i
        and (i - first) // config.target_group_size == (j - first) // config.target_group_size
    )


def bucket(difference, num_buckets):
    """The published rule."""
    return min(int(math.log(max(abs(difference), 1)) / 0.301), num_buckets)


class PaddedHSTULayer(nn.Module):
    """The same layer on padded `[B, N, E]` rows, with its weights as matrices that multiply from
    the right."""

    def __init__(self, config):
        super().__init__()
        self.sizes = [
            HEADS * (size or WIDTH // HEADS)
            for size in (config.linear_dim, config.linear_dim, config.head_dim, config.head_dim)
        ]
        self.scaling_seqlen, outputs = config.scaling_seqlen, self.sizes[0]
        shapes = dict(
            input_norm_weight=[WIDTH],
            input_norm_bias=[WIDTH],
            uvqk_weight=[WIDTH, sum(self.sizes)],
            uvqk_beta=[sum(self.sizes)],
            output_norm_weight=[outputs],
            output_norm_bias=[outputs],
            output_weight=[3 * outputs, WIDTH],
        )
        if config.relative_position:
            shapes["position_bias"] = [2 * config.relative_position - 1]
        if config.relative_time:
            shapes["time_bias"] = [config.relative_time + 1]
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * shape[0] ** -0.5))

    def forward(self, x, keep, entries):
        """entries: of each bias table, the index of the entry of each score, [B, N, N]."""
        normed = nnf.layer_norm(x, [WIDTH], self.input_norm_weight, self.input_norm_bias, 1e-6)
        u, v, q, k = (normed @ self.uvqk_weight + self.uvqk_beta).split(self.sizes, dim=-1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        for name, index in entries.items():
            scores = scores + getattr(self, name)[index][:, None]
        p = nnf.silu(scores) / self.scaling_seqlen
        a = (p.masked_fill(~keep[:, None], 0.0) @ v).transpose(1, 2).flatten(2)
        u = nnf.silu(u)
        y = u * nnf.layer_norm(
            a, a.shape[-1:], self.output_norm_weight, self.output_norm_bias, 1e-6
        )
        return x + torch.cat([u, a, y], dim=-1) @ self.output_weight


class PaddedHSTU(nn.Module):
    """Padded layers on `[L, E]` rows of segments of `lengths`, the last `num_targets` of each
    targets."""

    def __init__(self, num_layers, config):
        super().__init__()
        self.layers, self.config = (
            nn.ModuleList(PaddedHSTULayer(config) for _ in range(num_layers)),
            config,
        )

    def forward(self, values, lengths, num_targets, timestamps=None, query_timestamps=None):
        longest, config = max(lengths), self.config
        times, query_times = (
            None if x is None else x.tolist() for x in (timestamps, query_timestamps)
        )

        def matrices(entry, nothing):
            """[B, N, N] of entry(i, j, n, t, first) for rows i and columns j of segments. Lists: a
            tensor's elements are slow to write."""
            rows = [[[nothing] * longest for _ in range(longest)] for _ in lengths]
            for b, (n, t) in enumerate(zip(lengths, num_targets, strict=True)):
                for i, j in itertools.product(range(n), range(n)):
                    rows[b][i][j] = entry(i, j, n, t, sum(lengths[:b]))
            return torch.tensor(rows)

        def time_entry(i, j, n, t, first):
            u = times[first + min(i + 1, n - 1)] if query_times is None else query_times[first + i]
            return bucket(u - times[first + j], config.relative_time)

        keep, entries = matrices(lambda i, j, n, t, first: sees(i, j, n, t, config), False), {}
        if config.relative_position:
            entries["position_bias"] = matrices(
                lambda i, j, *_: j - i + config.relative_position - 1, 0
            )
        if config.relative_time:
            entries["time_bias"] = matrices(time_entry, 0)
        real = torch.arange(longest) < torch.tensor(lengths)[:, None]
        x = values.new_zeros(*real.shape, WIDTH).masked_scatter(real[:, :, None], values)
        for layer in self.layers:
            x = layer(x, keep, entries)
        return x[real]


NAMES = dict(
    input_norm_weight="input_norm.weight",
    input_norm_bias="input_norm.bias",
    uvqk_weight="uvqk_proj.weight",
    uvqk_beta="uvqk_proj.bias",
    output_norm_weight="output_norm.weight",
    output_norm_bias="output_norm.bias",
    output_weight="out_proj.weight",
    position_bias="position_bias",
    time_bias="time_bias",
)


def converted(parameters):
    """The state of an HSTUStack with a PaddedHSTU's parameters."""
    state = {}
    for name, x in parameters.items():
        layer, own = name.rsplit(".", 1)
        state[f"{layer}.{NAMES[own]}"] = x.T if x.dim() == 2 else x
    return state


def config_of(**fields):
    return jm.HSTUConfig(**(dict(scaling_seqlen=10) | fields))


CONFIGS = {
    "plain": config_of(),
    "dims": config_of(head_dim=3, linear_dim=5),
    "context": config_of(contextual_seqlen=2),
    "one-context-row": config_of(contextual_seqlen=1, max_attn_len=2),
    "short": config_of(max_attn_len=2),
    "short-full": config_of(max_attn_len=2, min_full_attn_seqlen=3),
    "context-short": config_of(contextual_seqlen=3, max_attn_len=2),
    "groups": config_of(target_group_size=2),
    "prefix": config_of(max_attn_len=2, global_prefix=2),
    "truncated": config_of(recent_history=3),
    "context-truncated": config_of(
        contextual_seqlen=3, max_attn_len=4, recent_history=2, global_prefix=1
    ),
    "full-truncated": config_of(
        max_attn_len=1,
        min_full_attn_seqlen=3,
        recent_history=4,
        global_prefix=3,
        target_group_size=2,
    ),
    "all": config_of(
        contextual_seqlen=2,
        max_attn_len=3,
        min_full_attn_seqlen=2,
        target_group_size=3,
        linear_dim=3,
    ),
}
HISTORY, TARGETS = [7, 0, 1, 2, 3, 4, 5, 6, 12, 3], [2, 1, 3, 4, 0, 5, 2, 1, 7, 3]
LENGTHS = [h + t for h, t in zip(HISTORY, TARGETS)]
every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)


def double_stack(config):
    return jm.HSTUStack(WIDTH, HEADS, LAYERS, config).double()


def history_values():
    """[sum(LENGTHS), WIDTH], fp64: the rows of `LENGTHS`."""
    return torch.randn(sum(LENGTHS), WIDTH, dtype=torch.float64)
