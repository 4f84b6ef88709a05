"""Where curvature comes from, and its file format."""

from .curvature import Curvature
from .format import open_curvature

__all__ = ["Curvature", "open_curvature"]
