"""Meta's HSTU layer, from generative-recommenders, with the weights of this project's.

Like every peer, it is imported when it is called: `generative_recommenders` must be importable.
"""

import importlib
import sys
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

import jagged_modules as jm

STU = "Meta STU (Triton)"
# name -> whether the backward computes the normed input, the projection and the input of the output
# projection again, as the layers of Meta's models do
RECOMPUTES = {STU: True, f"{STU}, no recompute": False}
# One configuration that its backward tries reads memory that is not its own ("illegal memory
# access", torch 2.11, Triton 3.6): num_warps, num_stages and constants.
ILLEGAL = (8, 2, {"BLOCK_M": 32, "BLOCK_N": 128, "SEQUENCE_PARALLEL": False, "UNROLL": 4})
BOUND = 0.03  # its rows are bf16, and so is its sum of the gradient of q
# our parameter -> its own
PARAMETERS = {
    "input_norm.weight": "_input_norm_weight",
    "input_norm.bias": "_input_norm_bias",
    "uvqk_proj.weight": "_uvqk_weight",
    "uvqk_proj.bias": "_uvqk_beta",
    "output_norm.weight": "_output_norm_weight",
    "output_norm.bias": "_output_norm_bias",
    "out_proj.weight": "_output_weight",
}


def transposed(name: str, x: Tensor) -> Tensor:
    """A weight of a projection, or its gradient: Meta's are `[in, out]`, ours `[out, in]`."""
    return x.t() if name.endswith(("proj.weight", "proj_weight")) else x


def attention_operator() -> types.ModuleType:
    """The module of its attention, whose backward tries the ILLEGAL configuration no more."""
    operator = importlib.import_module("generative_recommenders.ops.triton.triton_hstu_attention")
    tuner, (*numbers, constants) = operator._hstu_attn_bwd, ILLEGAL
    tuner.configs = [
        x
        for x in tuner.configs
        if [x.num_warps, x.num_stages] != numbers or not constants.items() <= x.kwargs.items()
    ]
    return operator


def stu(
    layer: jm.HSTULayer, lengths: Tensor, recompute: bool, kernel: str = "TRITON"
) -> tuple[Callable[[Tensor], Tensor], dict[str, nn.Parameter]]:
    """Its layer on bf16 rows, and its parameters by our names.

    Both layers compute the same if ours has a LayerNorm, no dropout, causal attention without other
    options, and a scaling_seqlen of the maximum length, by which Meta divides. Both have u, v, q
    and k in this order and norms with an eps of 1e-6. It is measured in eval mode: in training mode
    it draws random numbers for a dropout of 0 too.

    Args:
        lengths: `[B]`, on the host.
        kernel: a name of its `HammerKernel`.
    """
    # of a newer torchrec than torch 2.11 has; what reads it is not called
    absent = types.ModuleType("torchrec.modules.sorted_index_select")
    vars(absent)["maybe_sorted_index_select"] = None
    sys.modules.setdefault(absent.__name__, absent)
    common = importlib.import_module("generative_recommenders.common")
    modules = importlib.import_module("generative_recommenders.modules.stu")
    operator = importlib.import_module(
        "generative_recommenders.ops.triton.triton_hstu_preprocess_and_attention"
    )
    # Its TMA descriptors take q, k and v for contiguous. They are columns of the projection, so the
    # layer's gradients are NaN with TMA, which it chooses on compute capability 9.0.
    operator._should_enable_tma = lambda: False
    attention_operator()
    longest = int(lengths.max())
    common.set_static_max_seq_lens([longest])  # as its models do; for its choice of configurations
    config = modules.STULayerConfig(
        layer.embedding_dim,
        layer.num_heads,
        hidden_dim=layer.linear_dim,
        attention_dim=layer.head_dim,
        output_dropout_ratio=0.0,
        target_aware=False,
        recompute_normed_x=recompute,
        recompute_uvqk=recompute,
        recompute_y=recompute,
    )
    ours = dict(layer.named_parameters())
    device = ours["uvqk_proj.weight"].device
    peer = modules.STULayer(config).to(device).eval()
    peer.set_hammer_kernel(common.HammerKernel[kernel])
    with torch.no_grad():
        for name, own in PARAMETERS.items():
            getattr(peer, own).copy_(transposed(name, ours[name]))
    lengths = lengths.to(device)
    offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))

    def forward(x: Tensor) -> Tensor:
        return peer(x, lengths, offsets, longest, None)

    return forward, {name: getattr(peer, own) for name, own in PARAMETERS.items()}
