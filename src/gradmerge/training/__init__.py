"""Fine-tuning that merges well: a quadratic penalty towards the base, and curvature left over from training."""
