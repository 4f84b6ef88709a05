"""transformers, and what it and peft import, without progress bars and warnings."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers inside; what matters to users becomes errors and notes of ours."""
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
