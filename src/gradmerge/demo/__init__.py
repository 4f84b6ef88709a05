"""The main job in one command: train, estimate curvature, merge, remove and compare, on scikit-learn's digits."""

from .demo_settings import Settings
from .run import DemoResult, run_demo

__all__ = ["DemoResult", "Settings", "run_demo"]
