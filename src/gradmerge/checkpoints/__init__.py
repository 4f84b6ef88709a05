"""Reading any checkpoint tensor by tensor, and comparing checkpoints."""

from ..storage.tensorfile import TensorInfo
from .compare import Comparison, compare
from .model import Buffers, Checkpoint, Digest
from .opening import open_checkpoint

__all__ = ["Buffers", "Checkpoint", "Comparison", "Digest", "TensorInfo", "compare", "open_checkpoint"]
