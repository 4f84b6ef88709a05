"""The demonstration: train, estimate curvature, merge, improve, remove and evaluate, on scikit-learn's digits."""

from .demo_settings import Settings
from .run import DemoResult, run_demo

__all__ = ["DemoResult", "Settings", "run_demo"]
