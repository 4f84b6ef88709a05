"""Reading any checkpoint tensor by tensor, and comparing checkpoints."""

from .compare import compare
from .model import Buffers, Checkpoint
from .opening import open_checkpoint

__all__ = ["Buffers", "Checkpoint", "compare", "open_checkpoint"]
