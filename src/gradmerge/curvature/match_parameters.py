"""Which parameters an optimizer's state belongs to: it has numbers where a checkpoint has names."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from ..errors import InputError
from ..io.remote_code_guard import refuse_hub_code
from ..io.small_files import MAX_CONFIG, read_bounded
from ..quiet import quiet_transformers
from ..text import first_line, listed
from .checkpoint_names import skeleton

Shape = tuple[int, ...]


def empty_model(folder: Path) -> nn.Module:
    """The model that `config.json` describes, without memory for its weights and without code from elsewhere."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"{folder}: no config.json, so the names of the optimizer's parameters are not known. Put the model's "
            "config.json there, or pass the model in Python: gm.import_curvature(folder, …, model=model)."
        )
    try:
        config = json.loads(read_bounded(path, MAX_CONFIG))
        architecture = config["architectures"][0]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise InputError(f"{path}: does not name the model's class under `architectures`") from error
    refuse_hub_code(config, path)
    import transformers

    model_class: Any = getattr(transformers, architecture, None) if isinstance(architecture, str) else None
    is_model = isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)
    if not is_model:
        raise InputError(
            f"{path}: transformers {transformers.__version__} has no model class {architecture!r}. Code that comes "
            "with a model is not run; pass the model in Python: gm.import_curvature(folder, …, model=model)."
        )
    try:
        with quiet_transformers():
            return skeleton(model_class, model_class.config_class.from_pretrained(folder, local_files_only=True))
    except Exception as error:
        raise InputError(f"{path}: {architecture} cannot be built from it ({first_line(error)})") from error


def parameter_names(model: nn.Module, groups: Sequence[Sequence[Shape | None]]) -> list[list[str]]:
    """Names of an optimizer's parameters, group by group; a shape is None where the optimizer holds none.

    One group is taken to be in the order of ``model.named_parameters()``; two are the Trainer's, with and without
    weight decay. Parameters that were frozen may be missing, if the shapes of the others tell which.
    """
    shapes = {n: tuple(p.shape) for n, p in model.named_parameters()}
    if len(groups) == 1:
        return [_matched(shapes, groups[0], "")]
    if len(groups) == 2:
        decay = _decay_names(model)
        with_decay = {n: s for n, s in shapes.items() if n in decay}
        without = {n: s for n, s in shapes.items() if n not in decay}
        return [_matched(with_decay, groups[0], " with weight decay"), _matched(without, groups[1], " without")]
    raise InputError(
        f"the optimizer has {len(groups)} groups of parameters, and does not say what they are called. Known are one "
        "group, and the Trainer's two. Name them for the optimizer (AdamW([{'params': list(named_parameters), …}, …]) "
        "in PyTorch 2.6 or newer)."
    )


def check_names(model: nn.Module, names: Sequence[str], shapes: Sequence[Shape | None]) -> None:
    """Whether parameters that an optimizer names are the model's."""
    known = {n: tuple(p.shape) for n, p in model.named_parameters(remove_duplicate=False)}
    wrong = [
        f"{name}: {shape}, where the model has {known.get(name, 'nothing')}"
        for name, shape in zip(names, shapes, strict=True)
        if name not in known or shape not in (None, known[name])
    ]
    if wrong:
        raise InputError(_another_model(wrong))


def _decay_names(model: nn.Module) -> set[str]:
    try:
        from transformers import Trainer
    except (ImportError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[-1][:200]
        raise InputError(
            "the Trainer of transformers, which knows the order of an optimizer's parameters, cannot be imported "
            f"({reason}). It needs accelerate: pip install 'transformers[torch]'"
        ) from error
    # The Trainer's own rule, which changes between versions; it looks at the model only.
    rule: Any = Trainer.get_decay_parameter_names
    return set(rule(None, model))


def _matched(expected: Mapping[str, Shape], found: Sequence[Shape | None], kind: str) -> list[str]:
    """Names of the found shapes, which come in the expected order, with frozen parameters left out."""
    names, shapes = list(expected), list(expected.values())
    first = _embedded(shapes, found)
    if first is None:
        wrong = [
            f"parameter {number}{kind}: {other} in the optimizer, {shape} in the model ({name})"
            for number, (name, shape, other) in enumerate(zip(names, shapes, found, strict=False))
            if other not in (None, shape)
        ]
        if len(names) != len(found):
            wrong.insert(0, f"{len(found)} parameters{kind} in the optimizer, {len(names)} in the model")
        raise InputError(_another_model(wrong))
    backwards = _embedded(shapes[::-1], found[::-1])
    assert backwards is not None
    last = [len(names) - 1 - place for place in reversed(backwards)]
    ambiguous = [f"{names[a]} or {names[b]}" for a, b in zip(first, last, strict=True) if a != b]
    if ambiguous:
        raise InputError(
            f"the optimizer has {len(found)} parameters{kind}, the model has {len(names)}, and shapes do not tell "
            f"which ones were frozen. These could be either:\n{listed(ambiguous, 5)}\n  Estimate the curvature "
            "instead: gradmerge curvature estimate."
        )
    return [names[place] for place in first]


def _embedded(shapes: Sequence[Shape], found: Sequence[Shape | None]) -> list[int] | None:
    """The first places, in order, where ``shapes`` has what was found."""
    places: list[int] = []
    for place, shape in enumerate(shapes):
        if len(places) < len(found) and found[len(places)] in (None, shape):
            places.append(place)
    return places if len(places) == len(found) else None


def _another_model(lines: Sequence[str]) -> str:
    return (
        "the optimizer's state does not fit the model of config.json. It belongs to another model, or another version "
        f"of transformers, which orders parameters otherwise, trained it:\n{listed(lines, 5)}"
    )
