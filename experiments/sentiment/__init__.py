"""Four sentiment tasks merged into a model of IMDB: accuracy, robustness to weights, and gradient mismatch."""
