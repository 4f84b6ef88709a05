"""Calibration, distillation and removal: change the weights of a model with a few rows."""
