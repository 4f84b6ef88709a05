"""Tied weights: one parameter of a model under two names, such as a head that is also the embedding."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from .checkpoint import Buffers, Checkpoint
from .config_diff import completed

#: Tensor → modules that it can be tied to, as the classes of transformers declare it. A table, because importing the
#: class of a model takes seconds.
_TIED = {
    "lm_head.weight": "model.embed_tokens transformer.wte shared model.decoder.embed_tokens model.shared "
    "transformer.word_embeddings model.language_model.embed_tokens language_model.model.embed_tokens wte "
    "backbone.embeddings model.text_model.embed_tokens gpt_neox.embed_in led.shared model.language_model.shared "
    "transformer.w transformer.tokens_embed",
    "embed_out.weight": "gpt_neox.embed_in",
    "proj_out.weight": "model.decoder.embed_tokens",
    "output_projection.weight": "model.decoder.embed_tokens biogpt.embed_tokens",
    "encoder.embed_tokens.weight": "shared",
    "decoder.embed_tokens.weight": "shared",
    "model.encoder.embed_tokens.weight": "model.shared",
    "model.decoder.embed_tokens.weight": "model.shared",
    "cls.predictions.decoder.weight": "bert.embeddings.word_embeddings deberta.embeddings.word_embeddings "
    "ernie.embeddings.word_embeddings layoutlm.embeddings.word_embeddings mobilebert.embeddings.word_embeddings "
    "nomic_bert.embeddings.word_embeddings roformer.embeddings.word_embeddings",
    "cls.predictions.decoder.bias": "cls.predictions",
    "lm_head.decoder.weight": "roberta.embeddings.word_embeddings mpnet.embeddings.word_embeddings "
    "esm.embeddings.word_embeddings longformer.embeddings.word_embeddings",
    "lm_head.decoder.bias": "lm_head",
    "predictions.decoder.weight": "albert.embeddings.word_embeddings",
    "predictions.decoder.bias": "predictions",
    "vocab_projector.weight": "distilbert.embeddings.word_embeddings",
    "generator_lm_head.weight": "electra.embeddings.word_embeddings convbert.embeddings.word_embeddings",
    "decoder.weight": "model.embeddings.tok_embeddings",
    "pred_layer.proj.weight": "transformer.embeddings",
    "lm_loss.weight": "transformer.word_embedding",
}
TIED = {n: tuple(f"{module}.{n.rpartition('.')[2]}" for module in modules.split()) for n, modules in _TIED.items()}
#: The key of a config that says whether the head is the embedding.
KEY = "tie_word_embeddings"
#: Encoder and decoder share their embeddings whatever the config says about the head.
STACKS = ("encoder.embed_tokens", "decoder.embed_tokens", "model.encoder.", "model.decoder.")


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


def tied_to(name: str, checkpoint: Checkpoint) -> str | None:
    """Return the tensor that ``name`` is tied to in a checkpoint, or None if it is not tied there."""
    if says_untied(checkpoint) and not name.startswith(STACKS):
        return None
    return next((source for source in TIED.get(name, ()) if source in checkpoint.tensors), None)


def tied_copies(checkpoint: Checkpoint) -> dict[str, str]:
    """Return tensor → the tensor it is tied to, for tied weights that the checkpoint stores twice."""
    pairs = ((name, tied_to(name, checkpoint)) for name in TIED if name in checkpoint.tensors)
    return {name: source for name, source in pairs if source is not None and same_values(checkpoint, name, source)}


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
    models = (first, other)
    for name in TIED if first.config and other.config else ():
        source = next((s for s in TIED[name] if s in first.tensors and s in other.tensors), None)
        if source is None or not chosen(name) or name in first.absent | other.absent:
            continue
        if name not in first.tensors or not (name in other.tensors or tied_to(name, other)):
            continue  # compared as a missing or an additional tensor
        if is_head(name) and says_untied(first) and says_untied(other):
            continue
        copies = {model: name not in model.tensors or same_values(model, name, source) for model in models}
        ties = {model: name not in model.tensors or _class_ties(name, model) for model in models}
        if all(copies.values()) or not any(ties.values()):
            continue
        contradictory = [
            f"{model.label}: {KEY} is set, but the file stores {name} with other values than {source}; transformers 4 "
            f"ignores it, transformers 5 uses it. Set {KEY} to false if it was trained, or remove it from the file"
            for model in models
            if ties[model] and not copies[model]
        ]
        if len(contradictory) == 2:
            notes += contradictory
        elif contradictory:
            problems += contradictory
        else:
            untied, tied = sorted(models, key=ties.__getitem__)
            problems.append(
                f"{KEY}: {name} is tied to {source} in {tied.label}, and a separate tensor in {untied.label}"
            )
    return problems, notes


def _class_ties(name: str, checkpoint: Checkpoint) -> bool:
    """Return whether the model's class ties a tensor. Some classes, such as T5's, ignore what the config says."""
    if name.startswith(STACKS):
        return True
    flag = (completed(checkpoint.config) or {}).get(KEY)
    return flag if isinstance(flag, bool) else _config_flag(checkpoint) is True


def same_values(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Return whether two tensors of a checkpoint are bit-identical."""
    return equal((checkpoint, name), (checkpoint, other))


def equal(first: tuple[Checkpoint, str], other: tuple[Checkpoint, str]) -> bool:
    """Return whether two tensors are bit-identical. Both are read in blocks."""
    (ours, name), (theirs, other_name) = first, other
    if ours.tensors[name] != theirs.tensors[other_name]:
        return False
    buffers, size, numel = Buffers(), 1 << 18, ours.tensors[name].numel
    for start in range(0, numel, size):
        stop = min(start + size, numel)
        left = ours.read(name, start, stop, buffers, "left")
        if not left.view(torch.uint8).equal(theirs.read(other_name, start, stop, buffers, "right").view(torch.uint8)):
            return False
    return True
