"""The demonstration: train, estimate curvature, merge, improve, remove and evaluate, on scikit-learn's digits."""

from .digits import Settings
from .run import run_demo

__all__ = ["Settings", "run_demo"]
