"""Graph passes: transformations of whole models."""

from .fuse import fuse_broadcasts
from .report import OperatorSizes, Ranges, Report, Site
from .timing import Times

__all__ = ["OperatorSizes", "Ranges", "Report", "Site", "Times", "fuse_broadcasts"]
