"""Memory that runs out: told from other errors, and put so that a user knows what to do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..errors import MachineError


def is_out_of_memory(error: BaseException) -> bool:
    says = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "not enough memory" in says or "out of memory" in says


@contextlib.contextmanager
def enough_memory(examples: str) -> Iterator[None]:
    """Memory that runs out is the machine's failure: there is no smaller batch than these examples."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise MachineError(
            f"out of memory with {examples}. Use shorter examples (--max-length), --dtype bfloat16, or a larger device."
        ) from None
