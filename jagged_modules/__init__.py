"""PyTorch layers for recommendation models whose inputs have variable length: nothing is padded, nothing is copied per candidate."""

from jagged_kernels.tile_schedule import TileSchedule, zigzag_schedule

from . import pytrees as _pytrees  # noqa: F401 - registers the containers
from .block_attention import BlockDiagonalSelfAttention
from .broadcast import CandidateIndex
from .gdpa import GDPABlock, GDPAConfig, JaggedGDPA
from .hstu import HSTUCache, HSTUConfig, HSTULayer, HSTUStack
from .jagged import Jagged
from .jagged_mlp import JaggedMLP
from .linear_compress import LinearCompressEmbedding
from .masks import AttentionMask
from .rotary import Rotary
from .settings import backward_workspace, batch_invariant, debug_checks
from .target_attention import JaggedTargetAttention

__all__ = [
    "AttentionMask",
    "BlockDiagonalSelfAttention",
    "CandidateIndex",
    "GDPABlock",
    "GDPAConfig",
    "HSTUCache",
    "HSTUConfig",
    "HSTULayer",
    "HSTUStack",
    "Jagged",
    "JaggedGDPA",
    "JaggedMLP",
    "JaggedTargetAttention",
    "LinearCompressEmbedding",
    "Rotary",
    "TileSchedule",
    "backward_workspace",
    "batch_invariant",
    "debug_checks",
    "zigzag_schedule",
]
