"""The main job in one command: train, measure, merge, remove and compare, on data that scikit-learn ships."""

from .run import DemoResult, run_demo
from .settings import Settings

__all__ = ["DemoResult", "Settings", "run_demo"]
