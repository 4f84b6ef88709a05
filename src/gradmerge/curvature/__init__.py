"""Where curvature comes from, and its file format."""

from .curvature import Curvature
from .files import CurvatureFile, default_curvature, open_curvature

__all__ = ["Curvature", "CurvatureFile", "default_curvature", "open_curvature"]
