"""Graph passes: transformations of whole models."""

from .fuse import fuse_broadcasts
from .report import OperatorSizes, Ranges, Report, Site

__all__ = ["OperatorSizes", "Ranges", "Report", "Site", "fuse_broadcasts"]
