"""PFFN, seed pooling, InterFormer and Kunlun in plain torch, one user after another, from the
formulas of the papers. They have a layer's weights."""

import torch
from torch.nn import functional as nnf


def compress(layer, x):
    (weight,) = layer.weights
    return weight @ x


def rms_norm(norm, x):
    mean = x.square().mean(-1, keepdim=True)
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return x * (mean + eps).rsqrt() * norm.weight


def heads(layer, x):
    return x.unflatten(-1, (layer.num_heads, -1))


def attend(layer, x, rows, seen=None):
    """JaggedGDPA or JaggedTargetAttention of x [N, E], or of the layer's seeds, to rows [M, E],
    those that are seen [N, M]."""
    options = getattr(layer, "config", None)
    activation = getattr(layer, "activation", "softmax")
    q = layer.seeds if x is None else heads(layer, layer.q_proj(x))
    k, v = (heads(layer, part) for part in layer.kv_proj(rows).chunk(2, -1))
    scale = q.shape[-1] ** -0.5
    if options is not None:
        scale = scale if options.scale is None else options.scale
        if options.qk_norm:
            q, k = rms_norm(layer.q_norm, q), rms_norm(layer.k_norm, k)
    scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
    if activation == "softmax":
        if seen is not None:
            scores = scores.masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1)
    else:
        gelu = nnf.gelu(scores, approximate="tanh")
        weights = {"identity": scores, "gelu_tanh": gelu}[activation]
    return layer.out_proj(torch.einsum("hnm,mhd->nhd", weights, v).flatten(1))


def block(layer, x, context=None, seen=None):
    normed = rms_norm(layer.norm, x)
    return x + attend(layer.attention, normed, normed if context is None else context, seen)


def pffn(layer, x, features):
    return block(layer.block, x, compress(layer.compress, rms_norm(layer.norm, features)))


def seed_pooling(layer, x, features=None):
    queries = None
    if features is not None:
        queries = rms_norm(layer.norm, compress(layer.seeds, features))
    pooled = attend(layer.attention, queries, x)
    if layer.compress is None:
        return pooled
    (weight,), out = layer.compress.weights, 0
    of_rank = layer.mix.weight.T.unflatten(0, (layer.rank, -1))
    for i in range(layer.rank):  # Σ_i Z_iᵀ H W_i
        out = out + weight[i :: layer.rank] @ pooled @ of_rank[i]
    return out


def gate(layer, x):
    return nnf.silu(x * layer.linear2(nnf.silu(layer.linear1(x))))


def interact(layer, x):
    rank, outputs = layer.sizes
    columns, shortcut = compress(layer.compress, x).split([rank, outputs])
    products = layer.products_norm((x @ columns.T).flatten())
    out = layer.linear2(nnf.silu(layer.linear1(products))).unflatten(0, (outputs, -1))
    return rms_norm(layer.norm, out + shortcut)


def interformer(layer, history, features):
    config, cls = layer.config, layer.config.num_cls
    for i, own in enumerate(layer.layers):
        of_features = gate(own.features_gate, compress(own.compress, features))
        if i == 0:
            history = torch.cat([of_features, history])
        events = history[cls:]
        missing = max(0, config.num_recent - len(events))
        recent = nnf.pad(events[len(events) - config.num_recent + missing :], (0, 0, missing, 0))
        summary = torch.cat([history[:cls], attend(own.pool, None, history), recent])
        vectors = torch.cat([features, gate(own.history_gate, summary)])
        history = pffn(own.pffn, history, of_features)
        seen = None
        if config.window is not None:
            place = torch.arange(len(history))
            near = (place[:, None] - place).abs() <= config.window
            seen = near | (place < cls) | (place < cls)[:, None]
        history = block(own.attention, history, seen=seen)
        features = interact(own.interaction, vectors)
    return history[cls:], features


def kunlun(layer, history, features):
    config, summary = layer.config, None
    for own in layer.layers:
        hidden = nnf.silu(own.linear1(compress(own.compress, features)))
        of_features = own.linear2(hidden)
        if own.pool is not None:
            summary = seed_pooling(own.pool, history)
        features = interact(own.interaction, torch.cat([of_features, summary]))
        if own.pffn is not None:
            history = pffn(own.pffn, history, of_features)
        if own.attention is not None:
            place = torch.arange(len(history))
            seen = None
            if config.window is not None:
                seen = (place[:, None] - place).abs() <= config.window
            history = block(own.attention, history, seen=seen)
    return history, features
