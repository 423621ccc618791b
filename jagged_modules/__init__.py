"""PyTorch layers for recommendation models with variable-length inputs. Nothing is padded, and no
user is copied per candidate."""

import importlib.util
import os
from typing import TYPE_CHECKING, Any

from jagged_kernels.attention.pages import Pages
from jagged_kernels.schedule.host import TileSchedule, zigzag_schedule

from . import pytrees as _pytrees  # noqa: F401  # pyright: ignore[reportUnusedImport] - registers the containers
from .bias import RelativeBias
from .containers.candidates import CandidateIndex
from .containers.collate import collate
from .containers.history_cache import HistoryCache
from .containers.jagged import Jagged
from .graphed import graphed
from .layers.block_attention import BlockDiagonalSelfAttention
from .layers.din_attention import JaggedDINAttention
from .layers.encoder import JaggedEncoder, JaggedEncoderLayer
from .layers.gdpa import GDPAConfig, JaggedGDPA
from .layers.gdpa_block import GDPABlock
from .layers.hstu import HSTULayer
from .layers.hstu_config import HSTUConfig
from .layers.hstu_stack import HSTUStack
from .layers.interformer import InterFormerConfig, JaggedInterFormer
from .layers.kunlun import JaggedKunlun, KunlunConfig
from .layers.linear_compress import LinearCompressEmbedding
from .layers.mlp import JaggedMLP
from .layers.pffn import JaggedPFFN
from .layers.seed_pooling import JaggedSeedPooling
from .layers.self_target_attention import JaggedSelfTargetAttention
from .layers.target_attention import JaggedTargetAttention
from .masks import AttentionMask
from .padded_check import PaddedComparison, compare_padded
from .rotary import Rotary
from .serving.paged_history_cache import CacheFull, CacheStatistics, PagedHistoryCache
from .settings import backward_workspace, batch_invariant, debug_checks, precompiled
from .unit_activations import UnitParameters

if TYPE_CHECKING:
    from . import transforms

__version__ = "0.1.0"  # that of pyproject.toml

__all__ = [
    "AttentionMask",
    "BlockDiagonalSelfAttention",
    "CacheFull",
    "CacheStatistics",
    "CandidateIndex",
    "GDPABlock",
    "GDPAConfig",
    "HSTUConfig",
    "HSTULayer",
    "HSTUStack",
    "HistoryCache",
    "InterFormerConfig",
    "Jagged",
    "JaggedDINAttention",
    "JaggedEncoder",
    "JaggedEncoderLayer",
    "JaggedGDPA",
    "JaggedInterFormer",
    "JaggedKunlun",
    "JaggedMLP",
    "JaggedPFFN",
    "JaggedSeedPooling",
    "JaggedSelfTargetAttention",
    "JaggedTargetAttention",
    "KunlunConfig",
    "LinearCompressEmbedding",
    "PagedHistoryCache",
    "PaddedComparison",
    "Pages",
    "RelativeBias",
    "Rotary",
    "TileSchedule",
    "UnitParameters",
    "backward_workspace",
    "batch_invariant",
    "collate",
    "compare_padded",
    "debug_checks",
    "graphed",
    "precompiled",
    "transforms",
    "zigzag_schedule",
]

if "JAGGED_KERNELS" in os.environ and importlib.util.find_spec("triton") is not None:
    from jagged_kernels.common.precompiled import import_modules

    import_modules()


def __getattr__(name: str) -> Any:
    """Imports `transforms` at its first use: sympy and torch.export take long to import."""
    if name == "transforms":
        return importlib.import_module(".transforms", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
