"""transformers, and what it and peft import, without progress bars and warnings."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_ALONE = threading.RLock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers inside; what matters to users becomes errors and notes of ours.

    One thread at a time: while transformers loads a model, it replaces the function that ties weights for all threads,
    and two that load at once could leave it replaced, so that no later model has its weights tied.
    """
    with _ALONE, _quietly():
        yield


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    from transformers import utils

    said: Any = utils.logging
    level, bars = said.get_verbosity(), said.is_progress_bar_enabled()
    said.set_verbosity_error()
    said.disable_progress_bar()
    # Imported by peft, it warns of a kernel for 4 bits on a CPU that it does without.
    quantised = logging.getLogger("bitsandbytes")
    before = quantised.level
    quantised.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        quantised.setLevel(before)
        said.set_verbosity(level)
        if bars:
            said.enable_progress_bar()
