"""How much of joint training's gain merging, calibration and distillation keep, on three kinds of models."""
