"""Graph passes: transformations of whole models."""

from .fuse import fuse_broadcasts
from .report import Report, Site

__all__ = ["Report", "Site", "fuse_broadcasts"]
