"""Compare checkpoints before a merge: every incompatibility, in one message."""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from ..errors import InputError
from ..io.reader import TensorInfo
from ..notes import Kind, Note
from ..text import counted, listed, nearest, some
from .checkpoint import Buffers, Checkpoint, is_same, unwrap_chain
from .config_diff import abbreviate, allows, differences, labels
from .embedding_rows import VOCABULARY, unwrap
from .quantization import ADVICE, detect_quantization
from .tied_weights import KEY as TYING, in_layer, same_values, tied_to, tying_differences
from .tokenizer import MATCH, template_notes, token_difference

#: Constants that older versions of transformers saved with the weights. Those in ``MASKS`` have the name of a bias, and
#: differ from it by their four dimensions.
BUFFERS = re.compile(
    r".*(position_ids|relative_position_index|token_type_ids)|.*\.(rotary_emb\.inv_freq|num_batches_tracked)|"
    r".*\.(attn|attention)\.masked_bias"
)
MASKS = (".attn.bias", ".attention.bias")
RENAME = 'If the names differ by a prefix, write under this model in the recipe: rename: {"ITS PREFIX": "NEW PREFIX"}'
#: Fine-tuning moves weight matrices by a few hundredths of their norm, long training on other data by a few tenths.
#: Unrelated matrices are about √2 apart.
UNRELATED_DISTANCE = 0.7
#: Entries of each matrix that are read to measure the distance of two models.
SAMPLE = 1 << 14


@dataclass
class Comparison:
    """The tensors to merge and to copy, and all problems that prevent the merge."""

    merged: list[str] = field(default_factory=list)
    copied: list[str] = field(default_factory=list)
    aliases: list[dict[str, str]] = field(default_factory=list)
    """For each other checkpoint: tensor → the tensor that it is tied to there, if only that one is stored."""
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_problem(self, lines: Sequence[str], what: str, advice: str = "", limit: int = 8) -> None:
        """Add a problem, unless there are no lines."""
        if lines:
            self.problems.append(f"{what}\n{listed(lines, limit)}" + (f"\n  {advice}" if advice else ""))


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def is_buffer(name: str, info: TensorInfo) -> bool:
    """Return whether a tensor is a constant that some checkpoints store beside the weights."""
    return BUFFERS.fullmatch(name) is not None or (len(info.shape) == 4 and name.endswith(MASKS))


def compare(
    first: Checkpoint,
    others: Sequence[Checkpoint],
    include: Sequence[str] = ("*",),
    exclude: Sequence[str] = (),
    *,
    allow_config: Sequence[str] = (),
    first_is_base: bool = True,
    one_tokenizer: bool = False,
) -> Comparison:
    """Compare every checkpoint with the first: names, shapes, types, vocabulary, ties, buffers, configs and distance.

    Args:
        first: The base, or the first model if there is no base.
        others: The models to compare with it.
        include: Patterns of the tensors to merge.
        exclude: Patterns of tensors to copy from ``first``.
        allow_config: Config keys that may differ. The differences become notes.
        first_is_base: Whether the other models should be fine-tuned from ``first``.
        one_tokenizer: The vocabulary rows are matched already, so that the tokenizers are not compared.
    """
    allow_config = [allow_config] if isinstance(allow_config, str) else allow_config
    result = Comparison()

    def chosen(name: str) -> bool:
        return matches(name, include) and not matches(name, exclude)

    for pattern in include:
        if not any(matches(name, [pattern]) for name in first.tensors):
            raise InputError(f"include: {pattern!r} matches no tensor{nearest(pattern, first.tensors)}")
    unused = [pattern for pattern in exclude if not any(matches(name, [pattern]) for name in first.tensors)]
    result.notes = [f"exclude: {pattern!r} matches no tensor of the base" for pattern in unused]
    selected = [name for name in first.tensors if chosen(name)]
    weights = {n for n in selected if first.tensors[n].is_float and not is_buffer(n, first.tensors[n])}
    result.merged = [n for n in first.tensors if n in weights]
    result.copied = [n for n in first.tensors if n not in weights]

    quantized = {
        id(checkpoint): f"{checkpoint.label}: {found}. {ADVICE}"
        for checkpoint in (first, *others)
        if (found := detect_quantization(checkpoint, chosen))
    }
    result.problems += quantized.values()
    unsupported = [n for n in selected if first.tensors[n].dtype.startswith(("F8", "C64"))]
    if id(first) not in quantized:
        result.add_problem(
            [f"{name}: {first.tensors[name]}" for name in unsupported],
            f"{first.label}: only float64, float32, float16 and bfloat16 can be merged",
            "Exclude these tensors, or convert the model.",
        )

    for other in others:
        aliases: dict[str, str] = {}
        if not quantized.keys() & {id(first), id(other)}:
            aliases = _compare_tensors(first, other, result, chosen)
            _note_unrelated(first, other, result, first_is_base)
        result.aliases.append(aliases)
        _compare_configs(first, other, result, chosen, allow_config)
        if not one_tokenizer:
            _note_tokens(first, other, result)
        result.notes += template_notes(first, other)

    averaged = [name for name in result.merged if name.endswith(("running_mean", "running_var"))]
    if averaged:
        result.notes.append(
            f"{counted(averaged, 'tensor')} of batch-norm statistics ({some(averaged, 2)}) are merged like weights and "
            "may not fit the merged model. Estimate them again on data, or exclude '*running_mean' and '*running_var'"
        )
    if not result.merged and not result.problems:
        result.problems.append("nothing to merge: include and exclude leave no floating-point tensor")
    return result


def _compare_tensors(
    first: Checkpoint, other: Checkpoint, result: Comparison, chosen: Callable[[str], bool]
) -> dict[str, str]:
    """Compare names, shapes and types. Return tensor → the stored tensor that it is tied to in ``other``."""
    aliases: dict[str, str] = {}
    missing: list[str] = []
    different: list[str] = []
    vocabulary: list[str] = []
    for name in (name for name in result.merged if name not in other.absent):
        stored = name if name in other.tensors else tied_to(name, other)
        if stored is None:
            missing.append(name)
            continue
        if stored != name:
            aliases[name] = stored
        ours, theirs = first.tensors[name], other.tensors[stored]
        if theirs.shape != ours.shape:
            is_vocabulary = VOCABULARY.fullmatch(name) and theirs.shape[1:] == ours.shape[1:]
            line = f"{name}: {list(ours.shape)} in {first.label}, {list(theirs.shape)} in {other.label}"
            (vocabulary if is_vocabulary else different).append(line)
        elif not theirs.is_float:
            different.append(f"{name}: {ours} in {first.label}, {theirs} in {other.label}")

    new = [n for n, info in other.tensors.items() if n not in first.tensors and chosen(n) and not is_buffer(n, info)]
    extra = [name for name in new if not _copies_tied(name, first, other)]
    if vocabulary:
        difference = token_difference(first, other)
        vocabulary += difference.lines if difference else []
    what = f"{other.label}: its vocabulary differs from that of {first.label}; rows of the embeddings are other tokens"
    result.add_problem(vocabulary, what, f"{MATCH}, resize one of them, or exclude these tensors.")
    what = f"{other.label}: {counted(missing, 'tensor')} of {first.label} missing"
    result.add_problem(missing, what, RENAME if extra else "")
    advice = "" if missing else "If these are heads that should not be merged, exclude them."
    result.add_problem(extra, f"{other.label}: {counted(extra, 'tensor')} that {first.label} does not have", advice)
    result.add_problem(different, f"{other.label}: shapes or types differ from {first.label}")
    return aliases


def _copies_tied(name: str, first: Checkpoint, other: Checkpoint) -> bool:
    """Return whether a tensor of ``other`` is a copy of one that ``first`` stores once for both names."""
    source = tied_to(name, first)
    return source is not None and source in other.tensors and same_values(other, name, source)


def _note_unrelated(first: Checkpoint, other: Checkpoint, result: Comparison, first_is_base: bool) -> None:
    """Add a warning if the weight matrices of two models are too far apart for a common base."""
    ours, theirs = (list(unwrap_chain(unwrap(checkpoint))) for checkpoint in (first, other))
    if any(is_same(part.base, inner) for part in theirs if hasattr(part, "base") for inner in ours):
        return  # an adapter on the first model, or on the base of the first model
    shared = [name for name in result.merged if name in other.tensors]
    distance, cosine = distance_of(first, other, shared)
    if distance >= UNRELATED_DISTANCE:
        base = first.label if first_is_base else f"the same base as {first.label}"
        text = (
            f"WARNING: {other.label} may not be fine-tuned from {base}: its weight matrices differ from those of "
            f"{first.label} by {distance:.2f} times their norm, with a cosine of {cosine:.2f}. After fine-tuning these "
            "are near 0 and 1. Models without a common base do not merge: check that these are the models you mean."
        )
        result.notes.append(Note(text, Kind.STRANGERS, distance=distance, cosine=cosine))


def distance_of(first: Checkpoint, other: Checkpoint, names: Sequence[str]) -> tuple[float, float]:
    """Return ‖θ_t − θ_0‖ / ‖θ_0‖ (0 if it is undefined) and the cosine of the matrices among ``names``.

    At most 64 matrices are read, and of each ``SAMPLE`` entries from its middle, which count for the whole matrix.
    """
    products = torch.zeros(3, dtype=torch.float64)
    buffers, infos = Buffers(), first.tensors
    matrices = [n for n in names if len(infos[n].shape) >= 2 and infos[n].numel and other.tensors[n].is_float]
    matrices = [name for name in matrices if other.tensors[name].shape == infos[name].shape]
    for name in matrices[:: -(-len(matrices) // 64) or 1]:
        length = min(SAMPLE, infos[name].numel)
        start = (infos[name].numel - length) // 2
        a = first.read(name, start, start + length, buffers, "ours").double()
        b = other.read(name, start, start + length, buffers, "theirs").double()
        # Sums of products instead of `@`, which would start every thread of the machine for microseconds of work.
        products += torch.stack([(a * a).sum(), (b * b).sum(), (a * b).sum()]) * (infos[name].numel / length)
    ours, theirs, product = products.tolist()
    square, norms = ours + theirs - 2 * product, math.sqrt(ours) * math.sqrt(theirs)
    distance = math.sqrt(max(0.0, square) / ours) if ours and math.isfinite(square) else 0.0
    return distance, product / norms if norms else 0.0


def _note_tokens(first: Checkpoint, other: Checkpoint, result: Comparison) -> None:
    """Note tokenizers that differ. It is a warning if tokens have other rows and the rows are merged."""
    difference = token_difference(first, other)
    if difference is None:
        return
    lines = "; ".join(difference.lines)
    shapes = [first.tensors[name].shape for name in result.merged if not in_layer(name)]
    text = f"{other.label}: its tokenizer differs from that of {first.label}, which the result gets: {lines}. {MATCH}"
    if difference.moved and any(len(shape) > 1 and shape[0] >= difference.rows for shape in shapes):
        text = f"WARNING: the merge mixes embeddings of different tokens. {text}"
        result.notes.append(Note(text, Kind.TOKENS, moved=difference.moved))
    else:
        result.notes.append(text)


def _compare_configs(
    first: Checkpoint, other: Checkpoint, result: Comparison, chosen: Callable[[str], bool], allowed: Sequence[str]
) -> None:
    """Add a problem for config keys that change what the weights compute, except for the ``allowed`` keys."""
    try:
        lines = [
            (key, f"{key}: {abbreviate(ours)} in {first.label}, {abbreviate(theirs)} in {other.label}")
            for key, (ours, theirs) in differences(first.config, other.config).items()
        ]
    except RecursionError:
        raise InputError(f"{other.label}: its config.json, or that of {first.label}, is nested too deeply") from None
    tying, notes = tying_differences(unwrap(first), unwrap(other), chosen)
    lines += [(TYING, line) for line in tying]
    result.notes += notes

    # Labels matter only if a head of that size is merged.
    ours, theirs = labels(first.config), labels(other.config)
    heads = [n for n in result.merged if "embed" not in n and first.tensors[n].shape[:1] == (len(ours),)]
    if ours and theirs and ours != theirs and heads:
        moved = [f"{n!r} is {ours[n]} and {theirs[n]}" for n in ours if n in theirs and ours[n] != theirs[n]]
        if moved:
            line = f"id2label: classes in another order in {first.label} and {other.label}: {some(moved)}"
            lines.append(("id2label", line))
        else:
            result.notes.append(
                f"{other.label}: its classes have other names (id2label) than those of {first.label}, which the result "
                f"gets; exclude {heads[0]} if they are other classes"
            )

    result.add_problem(
        [line for key, line in lines if not allows(allowed, key)],
        f"{other.label}: with its config the same weights compute something else than with that of {first.label}",
        "Use models that agree. If a difference is intended, list its key in allow_config.",
        limit=20,
    )
    accepted = [line for key, line in lines if allows(allowed, key)]
    if accepted:
        result.notes.append(
            f"{other.label}: allow_config accepts that its config differs; the result gets that of {first.label}. "
            + "; ".join(accepted)
        )
