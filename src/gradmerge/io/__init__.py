"""Tensors in files: positional reads, positional writes, and folders that appear whole or not at all.

Both `checkpoints` and `curvature` stand on this; it knows nothing of either.
"""
