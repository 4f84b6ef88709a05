"""What a merge costs, predicted from curvature or evaluated on data; previews over weights."""

from .predict import Interference, Prediction, predict

__all__ = ["Interference", "Prediction", "predict"]
