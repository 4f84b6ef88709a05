"""Whether checkpoints can be merged, found out before any work: every difference in one message."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ...errors import InputError
from ...io.reader import TensorInfo
from ...notes import Kind, Note
from ...text import counted, listed, nearest, some
from ..checkpoint import Checkpoint
from ..generation_notes import generation_notes
from ..quantization import quantisation
from ..tokenizer.embedding_rows import VOCABULARY, stored
from ..tokenizer.vocabulary import MATCH, token_difference
from ..views import beneath, is_same
from .config_diff import allows, comparable, differences, labels, shown
from .lineage import kinship, kinship_note
from .rename import rename_hint
from .tied_weights import KEY as TYING, equal, in_layer, same_values, tied_to, tying_differences

#: Constants that older versions of transformers saved with the weights and newer ones do not. Those in ``MASKS`` share
#: their name with a bias, and are told from it by their four dimensions.
BUFFERS = re.compile(
    r".*(position_ids|relative_position_index|token_type_ids)|.*\.(rotary_emb\.inv_freq|num_batches_tracked)|"
    r".*\.(attn|attention)\.masked_bias"
)
MASKS = (".attn.bias", ".attention.bias")


@dataclass
class Comparison:
    """What a merge of some checkpoints would do with each tensor of the first, and what stands in its way."""

    merged: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    aliases: list[dict[str, str]] = field(default_factory=list)
    """One per checkpoint: tensor → the one it is tied to there, if only that is stored."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def refuse(self, lines: Sequence[str], what: str, advice: str = "", limit: int = 8) -> None:
        """A problem, if there are lines that show it."""
        if lines:
            self.problems.append(f"{what}\n{listed(lines, limit)}" + (f"\n  {advice}" if advice else ""))


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_buffer(name: str, info: TensorInfo) -> bool:
    """Whether a tensor is one of the constants that some checkpoints hold beside the weights."""
    return BUFFERS.fullmatch(name) is not None or (len(info.shape) == 4 and name.endswith(MASKS))


def compare(
    first: Checkpoint,
    others: Sequence[Checkpoint],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    *,
    allow_config: Sequence[str] = (),
    first_is_base: bool = True,
    settled: Sequence[str] = (),
) -> Comparison:
    """Compare every checkpoint with the first: names, shapes, types, vocabulary, tied heads, buffers, configs, origin.

    Differences between configs in the keys ``allow_config`` are noted instead of refused. Those that keys of the recipe
    have ``settled``, `tokenizer` or `chat_template`, are none.
    """
    allow_config = [allow_config] if isinstance(allow_config, str) else allow_config
    result = Comparison()

    def chosen(name: str) -> bool:
        return matches(name, include) and not matches(name, exclude)

    selected = [name for name in first.tensors if chosen(name)]
    for pattern in include:
        if not any(matches(name, [pattern]) for name in first.tensors):
            raise InputError(f"include: {pattern!r} matches no tensor{nearest(pattern, first.tensors)}")
    idle = [pattern for pattern in exclude if not any(matches(name, [pattern]) for name in first.tensors)]
    result.notes = [f"exclude: {pattern!r} matches no tensor of the base" for pattern in idle]
    wanted = {n for n in selected if first.tensors[n].is_float and not is_buffer(n, first.tensors[n])}
    result.merged = [n for n in first.tensors if n in wanted]
    result.copied = [n for n in first.tensors if n not in wanted]
    quantised = {id(c): found.problem(c.label) for c in (first, *others) if (found := quantisation(c, chosen))}
    result.problems += quantised.values()
    odd = [n for n in selected if first.tensors[n].dtype.startswith(("F8", "C64"))]
    if odd and id(first) not in quantised:
        more = f" (and {len(odd) - 1} more are of such types)" if len(odd) > 1 else ""
        result.problems.append(
            f"{first.label}: {odd[0]} has the type {first.tensors[odd[0]].dtype}{more}; only float64, float32, float16 "
            "and bfloat16 can be merged. Exclude it, or convert the model."
        )
    used: set[str] = set()
    for other in others:
        aliases: dict[str, str] = {}
        if not quantised.keys() & {id(first), id(other)}:
            aliases = _compare_one(first, other, result, chosen)
            _compare_integers(first, other, result, set(selected) - set(odd))
            _note_ancestry(first, other, result, aliases, first_is_base)
        result.aliases.append(aliases)
        used |= _compare_configs(first, other, result, chosen, allow_config)
        if "tokenizer" not in settled:
            _note_tokens(first, other, result)
        result.notes += generation_notes(first, other, settled)
    idle = [key for key in allow_config if key not in used]
    result.notes += [f"--allow-config {key}: the configs do not differ in it" for key in idle]
    averaged = [name for name in result.merged if name.endswith(("running_mean", "running_var"))]
    if averaged:
        result.notes.append(
            f"{counted(averaged, 'tensor')} of batch-norm statistics ({some(averaged, 2)}) are merged like weights and "
            "need not fit the merged model: estimate them again on data, or exclude '*running_mean' and '*running_var'"
        )
    if not result.merged and not result.problems:
        result.problems.append("nothing is left to merge: no float tensor is included and not excluded")
    return result


def _compare_one(
    first: Checkpoint, other: Checkpoint, result: Comparison, chosen: Callable[[str], bool]
) -> dict[str, str]:
    """Compare names, shapes and types; returns tensor → the one it is tied to, where ``other`` stores it only there."""
    aliases: dict[str, str] = {}
    missing: list[str] = []
    shapes: list[str] = []
    vocabulary: list[str] = []
    types: list[str] = []
    for name in (name for name in result.merged if name not in other.absent):
        stored = name if name in other.tensors else tied_to(name, other)
        if stored is None:
            missing.append(name)
            continue
        if stored != name:
            aliases[name] = stored
        here, there = first.tensors[name], other.tensors[stored]
        if there.shape != here.shape:
            is_vocabulary = VOCABULARY.fullmatch(name) and there.shape[1:] == here.shape[1:]
            line = f"{name}: {list(here.shape)} in {first.label}, {list(there.shape)} in {other.label}"
            (vocabulary if is_vocabulary else shapes).append(line)
        elif not there.is_float:
            types.append(f"{name}: {here} in {first.label}, {there} in {other.label}")
    extra = [n for n in other.tensors if n not in first.tensors and chosen(n) and not is_buffer(n, other.tensors[n])]
    extra = [n for n in extra if not _is_copy_of_tied(n, first, other, result)]
    what = f"another vocabulary than {first.label}; rows of the embeddings would not mean the same tokens"
    advice = f"{MATCH}, resize one of them, or exclude these tensors."
    differ = token_difference(first, other) if vocabulary else None
    result.refuse([*vocabulary, *(differ.lines if differ else [])], f"{other.label}: {what}", advice)
    hint = rename_hint(first, other, missing) if missing else ""
    result.refuse(missing, f"{other.label}: {counted(missing, 'tensor')} of {first.label} missing", hint)
    advice = "" if missing else "If they are heads that should stay out of the merge, exclude them."
    result.refuse(extra, f"{other.label}: {counted(extra, 'tensor')} that {first.label} does not have", advice)
    result.refuse(shapes, f"{other.label}: other shapes than {first.label}")
    result.refuse(types, f"{other.label}: weights that are no floating-point numbers")
    if aliases:
        pairs = ", ".join(f"{name} = {tied}" for name, tied in aliases.items())
        result.notes.append(f"{other.label}: tied weights are stored once: {pairs}")
    ours, theirs = (
        ", ".join(sorted({c.tensors[n].dtype for n in result.merged if n in c.tensors})) for c in (first, other)
    )
    if ours != theirs:
        result.notes.append(f"{other.label} is stored as {theirs}, {first.label} as {ours}")
    return aliases


def _note_tokens(first: Checkpoint, other: Checkpoint, result: Comparison) -> None:
    """Tokenizers that differ: a warning if a token has different rows, and rows are merged."""
    found = token_difference(first, other)
    if found is None:
        return
    shapes = [first.tensors[name].shape for name in result.merged if not in_layer(name)]
    if found.moved and any(len(shape) > 1 and shape[0] >= min(found.sizes) for shape in shapes):
        text = f"WARNING: {other.label}: its tokenizer maps words to other rows than that of {first.label}; unless you "
        text += f"know why, the merged embeddings will be garbage: {'; '.join(found.lines)}. {MATCH}"
        result.notes.append(Note(text, Kind.TOKENS, moved=len(found.moved)))
    else:
        text = f"{other.label}: its tokenizer is not that of {first.label}, which the result has"
        result.notes.append(f"{text}: {'; '.join(found.lines)}. {MATCH}")


def _compare_integers(first: Checkpoint, other: Checkpoint, result: Comparison, names: set[str]) -> None:
    """Integers are not merged but copied from the first: where they are more than buffers, they have to be the same."""
    refused: list[str] = []
    noted: list[str] = []
    for name in (n for n in result.copied if n in names):
        here, there = first.tensors[name], other.tensors.get(name)
        if here.is_float or is_buffer(name, here):
            continue
        if there is None:
            noted.append(f"{name} (which it does not have)")
        elif there.is_float or there.shape != here.shape:
            refused.append(f"{name}: {here} in {first.label}, {there} in {other.label}")
        elif equal((first, name), (other, name), lambda block: block.to(torch.int64)):
            continue
        elif len(here.shape) > 1:
            refused.append(f"{name}: {here}, with other values")
        else:
            noted.append(name)
    what = f"{other.label}: integers, which are not merged, differ from those of {first.label}"
    advice = f"Convert the model, or exclude these tensors to keep those of {first.label}."
    result.refuse(refused, what, advice)
    if noted:
        result.notes.append(f"{other.label}: integers that differ are taken from {first.label}: {some(noted)}")


def _compare_configs(
    first: Checkpoint, other: Checkpoint, result: Comparison, chosen: Callable[[str], bool], allowed: Sequence[str]
) -> set[str]:
    """Refuse configs that make another function of the same weights; returns the ``allowed`` keys that were needed."""
    try:
        found, unknown = differences(*comparable(first.config, other.config))
        lines = [
            (key, f"{key}: {shown(here)} in {first.label}, {shown(there)} in {other.label}")
            for key, (here, there) in found.items()
        ]
    except RecursionError:
        raise InputError(f"{other.label}: its config.json, or that of {first.label}, is nested too deeply") from None
    tying, notes = tying_differences(stored(first), stored(other), chosen)
    lines += [(TYING, line) for line in tying]
    lines += _other_labels(first, other, result)
    result.notes += notes
    allowing = {key: by for key, _ in lines if (by := allows(allowed, key))}
    refused = [line for key, line in lines if key not in allowing]
    what = f"{other.label}: its config makes another function of the weights than that of {first.label}"
    advice = "Take models that agree; if a difference is meant, pass --allow-config KEY for each key."
    result.refuse(refused, what, advice, limit=20)
    if allowing:
        result.notes.append(
            f"{other.label}: merged with another config, as --allow-config says; the result has that of {first.label}. "
            + "; ".join(line for key, line in lines if key in allowing)
        )
    ours, theirs = (checkpoint.config.get("problem_type") for checkpoint in (first, other))
    if ours and theirs and ours != theirs:
        result.notes.append(f"{other.label}: its problem_type is {shown(theirs)}, that of {first.label} {shown(ours)}")
    if unknown:
        result.notes.append(
            f"{other.label}: its config or that of {first.label} leaves out {some(unknown)}; "
            "whether they agree is not known"
        )
    return set(allowing.values())


def _other_labels(first: Checkpoint, other: Checkpoint, result: Comparison) -> Iterator[tuple[str, str]]:
    """Classes whose number differs between the models, if their head is merged; a note if only the names differ."""
    ours, theirs = labels(first.config), labels(other.config)
    heads = [n for n in result.merged if "embed" not in n and first.tensors[n].shape[:1] == (len(ours),)]
    if not ours or not theirs or ours == theirs or not heads:
        return
    moved = [f"{n!r} is {ours[n]} and {theirs[n]}" for n in ours if n in theirs and ours[n] != theirs[n]]
    if moved:
        yield "id2label", f"id2label: classes in another order in {first.label} and {other.label}: {some(moved)}"
    else:
        result.notes.append(
            f"{other.label}: its classes have other names (id2label) than those of {first.label}, which the result "
            f"has; exclude {heads[0]} if they are other classes"
        )


def _note_ancestry(
    first: Checkpoint, other: Checkpoint, result: Comparison, aliases: Mapping[str, str], first_is_base: bool
) -> None:
    ours, theirs = (list(beneath(stored(one))) for one in (first, other))
    bases = [below.base for below in theirs if hasattr(below, "base")]
    if any(is_same(base, below) for base in bases for below in ours):
        return  # an adapter of the first model, or of its base, stems from it, however far it moves
    there = {name: other.tensors.get(name) for name in result.merged if name not in aliases}
    shared = [n for n, info in there.items() if info and info.is_float and info.shape == first.tensors[n].shape]
    text = kinship_note(first, other, kinship(first, other, shared), first_is_base)
    result.notes += [text] if text else []


def _is_copy_of_tied(name: str, first: Checkpoint, other: Checkpoint, result: Comparison) -> bool:
    """Whether an extra tensor is only a copy of one that it is tied to, and that the first checkpoint stores once."""
    source = tied_to(name, first)
    if source is None or source not in other.tensors or not same_values(other, name, source):
        return False
    result.notes.append(f"{other.label}: {name} is a copy of {source}, which {first.label} stores once; left out")
    return True
