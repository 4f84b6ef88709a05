"""The main job in one command: train, estimate curvature, merge, remove and compare, on scikit-learn's digits."""

from .run import DemoResult, run_demo
from .settings import Settings

__all__ = ["DemoResult", "Settings", "run_demo"]
