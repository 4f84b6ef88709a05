"""Import and run transformers without its progress bars and warnings."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any

_lock = threading.RLock()


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers. What matters to users becomes errors and notes of gradmerge.

    Only one thread may be inside. While transformers loads a model, it replaces the function that ties weights for all
    threads. Two threads could leave it replaced, and later models would not have tied weights.
    """
    from transformers import utils

    transformers: Any = utils.logging
    bitsandbytes = logging.getLogger("bitsandbytes")  # warns when peft imports it on a machine without a GPU
    with _lock:
        levels = transformers.get_verbosity(), bitsandbytes.level
        has_bars = transformers.is_progress_bar_enabled()
        transformers.set_verbosity_error()
        transformers.disable_progress_bar()
        bitsandbytes.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            transformers.set_verbosity(levels[0])
            bitsandbytes.setLevel(levels[1])
            if has_bars:
                transformers.enable_progress_bar()
