"""Reading any checkpoint tensor by tensor, and comparing checkpoints."""

from .checkpoint import Buffers, Checkpoint
from .comparison import compare
from .open import open_checkpoint

__all__ = ["Buffers", "Checkpoint", "compare", "open_checkpoint"]
