"""What the shell offers on the tab key. It asks the program at every press, so nothing heavy is imported here."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

#: Words that an option takes, by its name.
WORDS = {
    "task": "auto classify causal-lm seq2seq image embedding",
    "dtype": "auto float32 bfloat16 float16 float64",
    "device": "auto cpu cuda mps",
    "engine": "local ray",
    "kind": "diagonal gram kronecker",
    "likelihood": "empirical sampled exact",
    "precision": "float32 bfloat16 log8",
}


def words_of(option: str) -> Callable[[str], list[str]]:
    """The words of an option that begin like what is typed."""
    return lambda incomplete: [word for word in WORDS[option].split() if word.startswith(incomplete)]


def method_names(incomplete: str) -> list[str]:
    """The methods whose names begin like what is typed; of a list with commas, like its last."""
    before, comma, last = incomplete.rpartition(",")
    return [before + comma + name for name in _methods() if name.startswith(last)]


def _methods() -> list[str]:
    """The names of all methods, read from their files: importing the rules would import torch, which takes seconds."""
    rules = Path(__file__).parent.parent / "rules"
    texts = (path.read_text("utf-8") for path in sorted(rules.glob("*.py")))
    return [name for text in texts for name in re.findall(r'^@rule\(\s*"([a-z0-9-]+)"', text, re.MULTILINE)]
