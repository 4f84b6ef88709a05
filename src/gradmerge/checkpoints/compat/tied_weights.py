"""Tied weights: one tensor of a model under two names, such as a head that is its embedding, stored once or twice."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ...quiet import quiet_transformers
from ..checkpoint import Buffers, Checkpoint

#: Tensor → modules whose tensor of the same kind may stand for it: for files without a config and for names that older
#: versions of transformers wrote, and to spare the usual models the seconds that it takes to ask transformers.
_TIED = {
    "lm_head.weight": "model.embed_tokens transformer.wte shared model.decoder.embed_tokens model.shared "
    "transformer.word_embeddings model.language_model.embed_tokens language_model.model.embed_tokens wte",
    "embed_out.weight": "gpt_neox.embed_in",
    "encoder.embed_tokens.weight": "shared",
    "decoder.embed_tokens.weight": "shared",
    "model.encoder.embed_tokens.weight": "model.shared",
    "model.decoder.embed_tokens.weight": "model.shared",
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings",
    "cls.predictions.decoder.bias": "cls.predictions",
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings",
    "lm_head.decoder.bias": "lm_head",
    "vocab_projector.weight": "distilbert.embeddings.word_embeddings",
}
TIED = {n: tuple(f"{module}.{n.rpartition('.')[2]}" for module in modules.split()) for n, modules in _TIED.items()}
#: The key of a config that says whether heads are embeddings.
KEY = "tie_word_embeddings"
#: Tensors that encoder and decoder share, whether or not the head is one with them.
STACKS = ("encoder.", "decoder.", "model.encoder.", "model.decoder.")


def ties_of_class(checkpoint: Checkpoint) -> dict[str, str]:
    """Tensor → the one it is tied to, as transformers declares for the class that the config names.

    Importing the class takes seconds: ask only about names that the table does not have.
    """
    stated = checkpoint.config.get("architectures")
    return _ties_of(str(stated[0])) if isinstance(stated, list) and stated and not says_untied(checkpoint) else {}


@functools.cache
def _ties_of(architecture: str) -> dict[str, str]:
    import transformers

    try:
        with quiet_transformers():
            found = getattr(transformers, architecture)._tied_weights_keys
    except Exception:  # a class that needs what is not installed, or whatever else a config names
        return {}
    # Some are patterns of names, between layers.
    pairs: dict[str, str] = found if isinstance(found, dict) else {}
    return {name: source for name, source in pairs.items() if re.fullmatch(r"[\w.]+\.(weight|bias)", name)}


def tied_to(name: str, checkpoint: Checkpoint) -> str | None:
    """The tensor that a head is tied to in a checkpoint, or None if it is not tied there."""
    if in_layer(name) or (says_untied(checkpoint) and not name.startswith(STACKS)):
        return None
    return _source(name, checkpoint)


def _source(name: str, checkpoint: Checkpoint) -> str | None:
    """From the table, or from transformers if the tensor is not stored, or another has the same values."""
    tensors = checkpoint.tensors
    for source in TIED.get(name, ()):
        if source in tensors:
            return source
    if name in tensors:
        others = (other for other in tensors if other != name and not in_layer(other))
        if len(tensors[name].shape) < 2 or not any(same_values(checkpoint, name, other) for other in others):
            return None
    source = ties_of_class(checkpoint).get(name, "")
    return source if source in tensors else None


def in_layer(name: str) -> bool:
    """Whether a tensor belongs to one of a model's numbered layers; ties are between tensors outside of them."""
    return re.search(r"\.\d+\.", name) is not None


def is_head(name: str) -> bool:
    return name.endswith(".weight") and not name.startswith(STACKS)


def says_untied(checkpoint: Checkpoint) -> bool:
    text = checkpoint.config.get("text_config")
    inner = text.get(KEY) if isinstance(text, dict) else None
    return checkpoint.config.get(KEY, inner) is False


def has_head(checkpoint: Checkpoint) -> bool:
    """Whether the architecture that a checkpoint was saved from, where it says so, gives tokens out."""
    stated = checkpoint.config.get("architectures")
    return not isinstance(stated, list) or any(re.search("LM|Generation|PreTraining", str(name)) for name in stated)


def other_ties(first: Checkpoint, other: Checkpoint, chosen: Callable[[str], bool]) -> Iterator[tuple[str, str]]:
    """Heads that are the embedding in one model and a tensor of their own, or none, in the other."""
    pair = first, other
    untied = [says_untied(checkpoint) for checkpoint in pair]
    lacking = [
        n for n in first.tensors if n not in other.tensors and not in_layer(n) and len(first.tensors[n].shape) > 1
    ]
    for head in dict.fromkeys([*TIED, *lacking] if first.config and other.config else []):
        if head in first.absent | other.absent:
            continue
        stored = [head in checkpoint.tensors for checkpoint in pair]
        alike = stored[0] == stored[1] and untied[0] == untied[1]
        if not is_head(head) or not chosen(head) or stored == [False, True] or alike:
            continue
        known = [source for checkpoint in pair if (source := _source(head, checkpoint))]
        sources = [next((source for source in known if source in c.tensors), "") for c in pair]
        if not all(sources):
            continue
        tied = [not stored[i] or same_values(pair[i], head, sources[i]) for i in (0, 1)]
        if not any(stored):
            which = first if untied[0] else other
            if which.config.get("architectures") and has_head(which):
                yield KEY, f"{KEY}: false in {which.label}, which stores no {head}"
        elif tied[0] != tied[1]:
            one, two = pair if tied[0] else pair[::-1]
            yield KEY, f"{KEY}: {head} is the embedding in {one.label}, and a tensor of its own in {two.label}"


def same_values(checkpoint: Checkpoint, one: str, two: str) -> bool:
    """Whether two tensors of a checkpoint are the same, bit by bit."""
    if checkpoint.tensors[one] != checkpoint.tensors[two]:
        return False
    return equal((checkpoint, one), (checkpoint, two), lambda block: block.view(torch.uint8))


def equal(one: tuple[Checkpoint, str], two: tuple[Checkpoint, str], view: Callable[[Tensor], Tensor]) -> bool:
    """Return whether ``view`` of two tensors of the same size is equal. Both are read in blocks."""
    buffers, size = Buffers(), 1 << 18
    numel = one[0].tensors[one[1]].numel
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        left = view(one[0].read(one[1], start, stop, buffers, "left"))
        if not torch.equal(left, view(two[0].read(two[1], start, stop, buffers, "right"))):
            return False
    return True
