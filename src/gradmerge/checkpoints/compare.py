"""Whether checkpoints can be merged, found out before any work: every difference in one message."""

from __future__ import annotations

import fnmatch
import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..errors import InputError
from ..storage.smallfile import MAX_TOKENIZER, read_bounded
from ..storage.tensorfile import TensorInfo
from ..words import listed, nearest
from .model import Buffers, Checkpoint

#: Heads that models leave out of a checkpoint when they are the same tensor as an embedding, and those embeddings.
TIED = {
    "lm_head.weight": (
        "model.embed_tokens.weight", "transformer.wte.weight", "shared.weight", "model.decoder.embed_tokens.weight",
        "model.shared.weight", "transformer.word_embeddings.weight", "model.language_model.embed_tokens.weight",
        "language_model.model.embed_tokens.weight", "wte.weight",
    ),
    "embed_out.weight": ("gpt_neox.embed_in.weight",),
    "encoder.embed_tokens.weight": ("shared.weight",),
    "decoder.embed_tokens.weight": ("shared.weight",),
    "model.encoder.embed_tokens.weight": ("model.shared.weight",),
    "model.decoder.embed_tokens.weight": ("model.shared.weight",),
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
    "cls.predictions.decoder.bias": ("cls.predictions.bias",),
    "lm_head.decoder.weight": ("roberta.embeddings.word_embeddings.weight",),
    "lm_head.decoder.bias": ("lm_head.bias",),
    "vocab_projector.weight": ("distilbert.embeddings.word_embeddings.weight",),
}  # fmt: skip

#: Constants that older versions of transformers saved with the weights and newer ones do not: by name alone, and those
#: that share their name with a bias and are told by their four dimensions.
BUFFERS = ["*position_ids", "*.rotary_emb.inv_freq", "*.attn.masked_bias", "*.attention.masked_bias", "*.num_batches_tracked",
           "*relative_position_index"]  # fmt: skip
MASKS = ["*.attn.bias", "*.attention.bias"]

EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "shared.weight", "embed_in.weight",
              "lm_head.weight", "embed_out.weight", "decoder.weight", "decoder.bias", "lm_head.bias")  # fmt: skip


@dataclass
class Comparison:
    """What a merge of some checkpoints would do with each tensor of the first, and what stands in its way."""

    merged: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    aliases: list[dict[str, str]] = field(default_factory=list)
    """One a checkpoint: tensor → the tied tensor that stands for it there."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_buffer(name: str, info: TensorInfo) -> bool:
    """Whether a tensor is one of the constants that some checkpoints hold beside the weights."""
    return matches(name, BUFFERS) or (len(info.shape) == 4 and matches(name, MASKS))


def select(names: Sequence[str], include: Sequence[str], exclude: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names to merge, and notes on patterns without effect; an include pattern that fits nothing is an error."""
    for pattern in include:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise InputError(f"include: {pattern!r} matches no tensor{nearest(pattern, names)}")
    notes = [
        f"exclude: {pattern!r} matches no tensor of the base"
        for pattern in exclude
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names)
    ]
    return [n for n in names if matches(n, include) and not matches(n, exclude)], notes


def compare(
    first: Checkpoint,
    others: Sequence[Checkpoint],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
) -> Comparison:
    """Compare every checkpoint with the first: names, shapes, types, vocabulary, tied heads, buffers."""
    result = Comparison()
    selected, result.notes = select(list(first.tensors), include, exclude)
    wanted = {n for n in selected if first.tensors[n].is_float and not is_buffer(n, first.tensors[n])}
    result.merged = [n for n in first.tensors if n in wanted]
    result.copied = [n for n in first.tensors if n not in wanted]
    for name in selected:
        if first.tensors[name].dtype.startswith(("F8", "C64")):
            result.problems.append(f"{first.label}: {name} has the type {first.tensors[name].dtype}; only float64, float32, "
                                   "float16 and bfloat16 can be merged. Exclude it, or convert the model.")  # fmt: skip
    for other in others:
        result.aliases.append(_compare_one(first, other, result, include, exclude))
    if not result.merged and not result.problems:
        result.problems.append("nothing is left to merge: no float tensor is included and not excluded")
    return result


def _compare_one(
    first: Checkpoint, other: Checkpoint, result: Comparison, include: Sequence[str], exclude: Sequence[str]
) -> dict[str, str]:
    aliases: dict[str, str] = {}
    missing: list[str] = []
    shapes: list[str] = []
    vocabulary: list[str] = []
    types: list[str] = []
    for name in result.merged:
        here = first.tensors[name]
        there = other.tensors.get(name)
        if there is None:
            tied = tied_to(name, other)
            if tied is None:
                missing.append(name)
                continue
            aliases[name] = tied
            there = other.tensors[tied]
        if there.shape != here.shape:
            line = f"{name}: {list(here.shape)} in {first.label}, {list(there.shape)} in {other.label}"
            is_vocabulary = name.endswith(EMBEDDINGS) and there.shape[1:] == here.shape[1:]
            (vocabulary if is_vocabulary else shapes).append(line)
        elif not there.is_float:
            types.append(f"{name}: {here} in {first.label}, {there} in {other.label}")
    extra = [
        n
        for n in other.tensors
        if n not in first.tensors
        and matches(n, include)
        and not matches(n, exclude)
        and not is_buffer(n, other.tensors[n])
    ]
    extra = [n for n in extra if not _is_copy_of_tied(n, first, other, result)]

    if vocabulary:
        result.problems.append(
            f"{other.label}: another vocabulary than {first.label}; rows of the embeddings would not mean the same tokens\n"
            f"{listed(vocabulary)}\n  Resize one of them, or exclude these tensors."
        )
    if missing:
        result.problems.append(
            f"{other.label}: {_count(missing)} of {first.label} missing{_prefix_hint(first, other)}\n{listed(missing)}"
        )
    if extra:
        hint = "" if missing else "\n  If they are heads that should stay out of the merge, exclude them."
        result.problems.append(
            f"{other.label}: {_count(extra)} that {first.label} does not have\n{listed(extra)}{hint}"
        )
    if shapes:
        result.problems.append(f"{other.label}: other shapes than {first.label}\n{listed(shapes)}")
    if types:
        result.problems.append(f"{other.label}: weights that are no floating-point numbers\n{listed(types)}")
    if aliases:
        pairs = ", ".join(f"{name} = {tied}" for name, tied in aliases.items())
        result.notes.append(f"{other.label}: tied weights are stored once: {pairs}")
    _note_types(first, other, result)
    _note_tokenizer(first, other, result)
    return aliases


def _count(names: Sequence[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def tied_to(name: str, checkpoint: Checkpoint) -> str | None:
    """The tensor that stands for a head which a checkpoint leaves out, or None if it is not tied there."""
    if _says_untied(checkpoint) and not name.startswith(("encoder.", "decoder.", "model.encoder.", "model.decoder.")):
        return None
    return next((source for source in TIED.get(name, ()) if source in checkpoint.tensors), None)


def _says_untied(checkpoint: Checkpoint) -> bool:
    text = checkpoint.config.get("text_config")
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return checkpoint.config.get("tie_word_embeddings", inner) is False


def _is_copy_of_tied(name: str, first: Checkpoint, other: Checkpoint, result: Comparison) -> bool:
    """Whether an extra tensor is only the stored copy of a tied one, as the first checkpoint has it."""
    source = tied_to(name, first)
    if source is None or source not in other.tensors or not same_values(other, name, source):
        return False
    result.notes.append(f"{other.label}: {name} is a copy of {source}, which {first.label} stores once; left out")
    return True


def same_values(checkpoint: Checkpoint, one: str, two: str, block: int = 1 << 18) -> bool:
    a, b = checkpoint.tensors[one], checkpoint.tensors[two]
    if a != b:
        return False
    buffers = Buffers()
    for start in range(0, a.numel, block):
        stop = min(start + block, a.numel)
        left = checkpoint.read(one, start, stop, buffers, "left").view(torch.uint8)
        if not torch.equal(left, checkpoint.read(two, start, stop, buffers, "right").view(torch.uint8)):
            return False
    return True


def _prefix_hint(first: Checkpoint, other: Checkpoint) -> str:
    """Says so when the names differ by a leading part alone, as between a bare model and one with a head."""
    for longer, shorter in ((first, other), (other, first)):
        shared: Counter[str] = Counter()
        for name in longer.tensors:
            prefix, dot, rest = name.partition(".")
            if dot and rest in shorter.tensors:
                shared[prefix + dot] += 1
        for prefix, count in shared.most_common(1):
            if count > len(shorter.tensors) // 2:
                return f" (the names of {longer.label} begin with {prefix!r}; save both from the same model class)"
    return ""


def _note_types(first: Checkpoint, other: Checkpoint, result: Comparison) -> None:
    def types(checkpoint: Checkpoint) -> set[str]:
        return {checkpoint.tensors[n].dtype for n in result.merged if n in checkpoint.tensors}

    if types(first) != types(other):
        result.notes.append(
            f"{other.label} is stored as {', '.join(sorted(types(other)))}, {first.label} as {', '.join(sorted(types(first)))}"
        )


def _note_tokenizer(first: Checkpoint, other: Checkpoint, result: Comparison) -> None:
    """Warns when both bring a tokenizer and the same token is not the same row: the result would be garbage."""
    if first.folder is None or other.folder is None or first.folder == other.folder:
        return
    ours, theirs = (c.folder / "tokenizer.json" for c in (first, other) if c.folder)
    if not (ours.is_file() and theirs.is_file()) or _sha256(ours) == _sha256(theirs):
        return
    if _vocabulary(ours) != _vocabulary(theirs):
        result.notes.append(f"{other.label}: its tokenizer maps words to other rows than that of {first.label}; "
                            "unless you know why, the merged embeddings will be garbage")  # fmt: skip


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bounded(path, MAX_TOKENIZER)).hexdigest()


def _vocabulary(path: Path) -> object:
    try:
        return json.loads(read_bounded(path, MAX_TOKENIZER))["model"]["vocab"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
