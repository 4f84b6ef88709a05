"""From what a merge changes to the entries of an adapter's file and its config, with what was lost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...cards.markdown import as_code, markdown_table
from ...checkpoints.adapter_config import read_adapter_config
from ...errors import InputError
from ...notes import Note
from ...urls import redact
from .build import Changes
from .layout import PREFIX, AdapterLayout, Place, task_of_adapter
from .parts import Part

#: A share that is lost to the rounding of factors in float32, and not to their rank.
ROUNDING = 1e-12


@dataclass
class WrittenAdapter:
    """An adapter whose parts are all there."""

    config: dict[str, Any]
    entries: dict[str, tuple[Part, str]]
    """Key in the adapter's file → the part, and its key there."""
    lost: dict[str, float]
    lost_share: float
    whole: list[str]
    ranks: dict[str, int]

    def facts(self) -> dict[str, Any]:
        return {"rank": self.config["r"], "lost_share": self.lost_share, "lost": self.lost, "saved_whole": self.whole}

    def notes(self) -> Iterator[Note]:
        if self.lost_share > ROUNDING:
            worst = max(self.lost, key=lambda name: self.lost[name])
            yield Note(
                f"rank {self.config['r']} holds {100 * (1 - self.lost_share):.4g} % of what the merge changes (as "
                f"squared Frobenius norm); {100 * self.lost_share:.3g} % is lost, of {worst} "
                f"{100 * self.lost[worst]:.3g} %"
            )
        if self.whole:
            more = f" and {len(self.whole) - 3} more" if len(self.whole) > 3 else ""
            yield Note(f"saved whole, as LoRA cannot hold them: {', '.join(self.whole[:3])}{more}")

    def text(self) -> str:
        """For the card."""
        intro = "A LoRA adapter that holds all that the merge changes of its base."
        if self.lost_share > ROUNDING:
            intro = (
                f"A LoRA adapter of rank {self.config['r']}. It lacks {100 * self.lost_share:.3g} % of what the merge "
                "changes of its base (squared Frobenius norm). Most is lost in"
            )
            worst = sorted(self.lost, key=lambda name: -self.lost[name])[:10]
            rows = [(as_code(name), str(self.ranks[name]), f"{100 * self.lost[name]:.3g} %") for name in worst]
            intro += "\n\n" + markdown_table(["tensor", "rank", "lost"], rows)
        return intro


def lay_out(changes: Changes) -> WrittenAdapter:
    """The parts under their names in the adapter, with whatever else the modules that are saved whole hold."""
    layout, parts = changes.layout, changes.parts
    for name in changes.plan.merged_tensors:  # in the order of the plan, whichever thread was first
        parts[name] = parts.pop(name)
    configs = [read_adapter_config(c.folder) for c in changes.adapters if c.folder is not None]
    task = task_of_adapter(changes.base, configs)
    factors = {name: layout.place(name) for name, part in parts.items() if "A" in part.keys}
    others = {name: layout.place(name) for name, part in parts.items() if part.is_whole}
    narrow = {place.module for place in factors.values()}
    biases = {name: place for name, place in others.items() if place.parameter == "bias" and place.module in narrow}
    modules = _modules_to_save(layout, [name for name in others if name not in biases], task)
    saved = {name: place for module in modules for name, place in layout.below(module).items()}
    entries = {place.key: (changes.whole(name), "whole") for name, place in saved.items()}
    tied = {other.key: (parts[name], "whole") for name in saved for other in layout.tied(name)}
    factors = {name: place for name, place in factors.items() if name not in saved}
    biases = {name: place for name, place in biases.items() if name not in saved}
    if not factors:
        found = "no tensor that LoRA can hold" if others else "nothing"
        raise InputError(
            f"output.format: {found} differs from the base, and an adapter without factors is none for PEFT. "
            "Write a model."
        )
    entries = tied | entries | (_all_biases(changes, factors, modules) if biases else {})
    for name, place in factors.items():
        entries |= {place.key_of(letter): (parts[name], letter) for letter in "AB"}
    moved = sum(part.norm for part in parts.values())
    config = _config(changes, task, factors) | {"modules_to_save": modules or None}
    config |= {"bias": "all" if biases else "none"} | ({"ensure_weight_tying": True} if tied else {})
    return WrittenAdapter(
        config,
        entries,
        {name: parts[name].share for name in factors},
        sum(parts[name].lost for name in factors) / moved if moved else 0.0,
        [name for name in (*saved, *biases) if parts[name].norm > 0],
        {name: parts[name].rank for name in factors},
    )


def _all_biases(changes: Changes, factors: Mapping[str, Place], modules: Sequence[str]) -> dict[str, tuple[Part, str]]:
    """Every bias of the model: PEFT's `bias: all`, which it takes to keep one that changes beside its module's factors.

    Under the names that PEFT gives them: those of modules that are saved whole come twice, as they are and were.
    """
    narrow = {place.module for place in factors.values()}
    found = {}
    for name, place in changes.layout.below("").items():
        if place.parameter != "bias":
            continue
        merged = (changes.whole(name), "whole")
        module = next((m for m in modules if f"{place.module}.".startswith(f"{m}.")), None)
        if module is not None:
            rest = place.key.removeprefix(f"{PREFIX}{module}.")
            found[f"{PREFIX}{module}.modules_to_save.{rest}"] = merged
            found[f"{PREFIX}{module}.original_module.{rest}"] = (changes.of_base(name), "whole")
        else:
            inner = "base_layer.bias" if place.module in narrow else "bias"
            found[f"{PREFIX}{place.module}.{inner}"] = merged
    return found


def _modules_to_save(layout: AdapterLayout, names: Sequence[str], task: str | None) -> list[str]:
    """The modules of some tensors and of those tied to them, with all that PEFT takes to be meant by their names."""
    found = {place.module for name in names for place in (layout.place(name), *layout.tied(name))}
    found |= set(layout.heads(task))
    found |= {path for module in found for path in layout.fitting(module)}
    return sorted(m for m in found if not any(m.startswith(f"{other}.") for other in found))


def _config(changes: Changes, task: str | None, places: Mapping[str, Place]) -> dict[str, Any]:
    """adapter_config.json. alpha is the rank everywhere: the scale is 1 for whoever reads rank_pattern or not."""
    ranks = [changes.parts[name].rank for name in places]
    rank = max(ranks, key=ranks.count)
    pattern = {place.module: own for place, own in zip(places.values(), ranks, strict=True) if own != rank}
    base = changes.base
    hub_id, _, revision = (base.hub_id or "").partition("@")
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": hub_id or redact(str((base.folder or base.files()[0]).absolute())),
        "revision": revision or None,
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": changes.layout.targets(places),
        "fan_in_fan_out": any(place.kind == "conv1d" for place in places.values()),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
