"""What a merge costs, before and after: predicted loss and mismatch, interference, previews over weights."""

from .predict import Interference, Prediction, predict

__all__ = ["Interference", "Prediction", "predict"]
