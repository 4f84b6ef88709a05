"""Tied weights: one parameter of a model under two names, such as a head that is also the embedding."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

import torch
from torch import Tensor

from ..quiet import quiet_transformers
from .checkpoint import Buffers, Checkpoint
from .config_diff import completed, parts

#: Tensor → modules that it can be tied to. The table covers files without a config, names that older versions of
#: transformers wrote, and the usual models, for which it saves the seconds that importing their class takes.
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
#: The key of a config that says whether the head is the embedding.
KEY = "tie_word_embeddings"
#: Encoder and decoder share their embeddings whatever the config says about the head.
STACKS = ("encoder.", "decoder.", "model.encoder.", "model.decoder.")


def in_layer(name: str) -> bool:
    """Return whether a tensor belongs to a numbered layer. Tied weights are outside of the layers."""
    return re.search(r"\.\d+\.", name) is not None


def is_head(name: str) -> bool:
    return name.endswith(".weight") and not name.startswith(STACKS)


def says_untied(checkpoint: Checkpoint) -> bool:
    return _config_flag(checkpoint) is False


def has_head(checkpoint: Checkpoint) -> bool:
    """Return whether the class in the config predicts tokens; True if the config names no class."""
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list):
        return True
    return any(re.search("LM|Generation|PreTraining", str(name)) for name in architectures)


def _config_flag(checkpoint: Checkpoint) -> bool | None:
    """Return what the config says about tied embeddings, or None if it says nothing."""
    text = checkpoint.config.get("text_config")
    flag = checkpoint.config.get(KEY, text.get(KEY) if isinstance(text, dict) else None)
    return flag if isinstance(flag, bool) else None


def ties_of_class(checkpoint: Checkpoint) -> dict[str, str]:
    """Return tensor → the tensor it is tied to, as the model's transformers class declares.

    Importing the class takes seconds, so callers ask only about names that ``TIED`` does not have.
    """
    architectures = checkpoint.config.get("architectures")
    if not isinstance(architectures, list) or not architectures or says_untied(checkpoint):
        return {}
    return _ties_of(str(architectures[0]))


@functools.cache
def _ties_of(architecture: str) -> dict[str, str]:
    import transformers

    try:
        with quiet_transformers():
            declared = getattr(transformers, architecture)._tied_weights_keys
    except Exception:  # the class needs a package that is not installed, or the name is not a class
        return {}
    pairs: dict[str, str] = declared if isinstance(declared, dict) else {}
    # Patterns tie modules inside of layers, which are compared like any other tensor.
    return {name: source for name, source in pairs.items() if re.fullmatch(r"[\w.]+\.(weight|bias)", name)}


def tied_to(name: str, checkpoint: Checkpoint) -> str | None:
    """Return the tensor that ``name`` is tied to in a checkpoint, or None if it is not tied there."""
    if in_layer(name) or (says_untied(checkpoint) and not name.startswith(STACKS)):
        return None
    tensors = checkpoint.tensors
    for source in TIED.get(name, ()):
        if source in tensors:
            return source
    if name in tensors:  # import the class only if another tensor has the same values
        others = (other for other in tensors if other != name and not in_layer(other))
        if len(tensors[name].shape) < 2 or not any(same_values(checkpoint, name, other) for other in others):
            return None
    source = ties_of_class(checkpoint).get(name, "")
    return source if source in tensors else None


def tied_copies(checkpoint: Checkpoint) -> dict[str, str]:
    """Return tensor → the tensor it is tied to, for tied weights that the checkpoint stores twice."""
    return {
        name: source
        for name, source in _tied_pairs(checkpoint, checkpoint)
        if name in checkpoint.tensors
        and (name.startswith(STACKS) or not says_untied(checkpoint))
        and same_values(checkpoint, name, source)
    }


def tying_differences(
    first: Checkpoint, other: Checkpoint, chosen: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """Return lines about weights that only one of two models ties, and notes. ``chosen`` says what is merged.

    A model can store a separate head although its config ties the head to the embedding. Loaders disagree about such a
    file: transformers 4 and most inference engines ignore the stored head, transformers 5 uses it. It merges only with
    models of which the same is true.
    """
    problems: list[str] = []
    notes: list[str] = []
    pair = (first, other)
    for name, source in _tied_pairs(first, other) if first.config and other.config else ():
        stored = [name in checkpoint.tensors for checkpoint in pair]
        if not chosen(name) or name in first.absent | other.absent:
            continue
        if stored == [False, False] and is_head(name) and says_untied(first) != says_untied(other):
            untied = first if says_untied(first) else other
            if untied.config.get("architectures") and has_head(untied):
                problems.append(f"{KEY}: false in {untied.label}, which stores no {name}")
        if not stored[0] or not (stored[1] or tied_to(name, other)):
            continue  # compared as a missing or an additional tensor
        if not name.startswith(STACKS) and says_untied(first) and says_untied(other):
            continue
        is_copy = [name not in checkpoint.tensors or same_values(checkpoint, name, source) for checkpoint in pair]
        if all(is_copy):
            continue
        is_tied = [name not in checkpoint.tensors or _class_ties(name, checkpoint) for checkpoint in pair]
        contradictory = [tied and not copy for tied, copy in zip(is_tied, is_copy, strict=True)]
        if all(contradictory):
            notes.append(f"{other.label} and {_contradiction(first, name, source)}")
        elif any(contradictory):
            problems.append(_contradiction(pair[contradictory.index(True)], name, source))
        elif any(is_tied):
            tied, untied = pair[is_tied.index(True)], pair[is_tied.index(False)]
            problems.append(
                f"{KEY}: {name} is tied to {source} in {tied.label}, and a separate tensor in {untied.label}"
            )
    return problems, notes


def _tied_pairs(first: Checkpoint, other: Checkpoint) -> list[tuple[str, str]]:
    """Return (tensor, the tensor it can be tied to) for every pair whose second tensor both models store."""
    shared = first.tensors.keys() & other.tensors.keys()
    pairs = [(name, source) for name, sources in TIED.items() for source in sources if source in shared]
    named = {n for pair in pairs if pair[0] in first.tensors.keys() | other.tensors.keys() for n in pair}
    vocabularies = [section.get("vocab_size") for _, section in parts(first.config)]
    unknown = [n for n, info in first.tensors.items() if len(info.shape) > 1 and not in_layer(n) and n not in named]
    as_long = [name for name in unknown if first.tensors[name].shape[0] in vocabularies]
    # Import the class only for models that may have a head that the table does not know.
    if len(as_long) > 1 or any(name not in other.tensors for name in unknown):
        declared = ties_of_class(other) | ties_of_class(first)
        pairs += [pair for pair in declared.items() if pair[1] in shared and pair not in pairs]
    return pairs


def _class_ties(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether the model's class ties a tensor. Some classes, such as T5's, ignore what the config says."""
    if name.startswith(STACKS):
        return True
    flag = (completed(checkpoint.config) or {}).get(KEY)
    return flag if isinstance(flag, bool) else _config_flag(checkpoint) is True


def _contradiction(checkpoint: Checkpoint, name: str, source: str) -> str:
    return (
        f"{checkpoint.label}: its config ties {name} to {source} ({KEY}), but its file stores different values for "
        f"the two. transformers 4 ignores the stored {name}, transformers 5 uses it. If it was trained, set {KEY} to "
        "false in config.json; otherwise remove it from the file"
    )


def same_values(checkpoint: Checkpoint, one: str, two: str) -> bool:
    """Return whether two tensors of a checkpoint are bit-identical."""
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
