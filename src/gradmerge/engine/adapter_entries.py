"""From what a merge changes to the entries of an adapter's file and its config, with what was lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ..checkpoints.adapter_config import read_adapter_config
from ..errors import InputError
from ..notes import Note
from .adapter_changes import Changes
from .adapter_layout import PREFIX, Place, task_of_adapter
from .adapter_parts import Part
from .card import as_table


@dataclass
class WrittenAdapter:
    """An adapter whose parts are all there."""

    config: dict[str, Any]
    entries: list[tuple[str, Part, str]]
    lost: dict[str, float]
    lost_share: float
    whole: list[str]
    ranks: dict[str, int]

    def facts(self) -> dict[str, Any]:
        return {"rank": self.config["r"], "lost_share": self.lost_share, "lost": self.lost, "saved_whole": self.whole}

    def notes(self) -> Iterator[Note]:
        if self.lost_share > 0:
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
        if self.lost_share > 0:
            intro = (
                f"A LoRA adapter of rank {self.config['r']}. It lacks {100 * self.lost_share:.3g} % of what the merge "
                "changes of its base (squared Frobenius norm). Most is lost in"
            )
            worst = sorted(self.lost, key=lambda name: -self.lost[name])[:10]
            rows = [(name, str(self.ranks[name]), f"{100 * self.lost[name]:.3g} %") for name in worst]
            intro += "\n\n" + as_table(["tensor", "rank", "lost"], rows)
        return f"\n{intro}\n"


def lay_out(changes: Changes) -> WrittenAdapter:
    """The parts under their names in the adapter, with whatever else the modules that are saved whole hold."""
    inputs = changes.plan.inputs
    configs = [read_adapter_config(c.folder) for c in changes.adapters if c.folder is not None]
    task = task_of_adapter(changes.base, configs)
    factors = {name: changes.layout.place(name) for name, part in changes.parts.items() if "A" in part.keys}
    with_factors = {place.module for place in factors.values()}
    modules: set[str] = set()
    biases: dict[str, Place] = {}
    for name in (name for name, part in changes.parts.items() if part.is_whole):
        place = changes.layout.place(name)
        if place.parameter == "bias" and place.module in with_factors:
            biases[name] = place
            continue
        modules |= {place.module, *(other.module for other in changes.layout.tied(name))}
    modules |= set(changes.layout.heads(task))
    modules |= {fits for module in modules for fits in changes.layout.fitting(module)}
    modules = {m for m in modules if not any(m.startswith(f"{other}.") for other in modules)}
    entries: list[tuple[str, Part, str]] = []
    jobs = {job.name: job for job in changes.plan.jobs}
    saved: list[str] = []
    for module in sorted(modules):
        for name, place in changes.layout.below(module).items():
            entries.append((place.key, changes.whole(jobs[name]), "whole"))
            factors.pop(name, None)
            biases.pop(name, None)
            saved.append(name)
    have = {key for key, *_ in entries}
    for name in dict.fromkeys(saved):
        for other in changes.layout.tied(name):
            if other.key not in have:
                entries.append((other.key, changes.parts[name], "whole"))
    for name, place in biases.items():
        entries.append((f"{PREFIX}{place.module}.base_layer.bias", changes.parts[name], "whole"))
    for name, place in factors.items():
        entries += [(place.key_of(letter), changes.parts[name], letter) for letter in "AB"]
    if not factors:
        raise InputError(
            "output.format: the merge changes no tensor that LoRA can hold, and an adapter without factors is "
            "none for PEFT. Write a model."
        )
    ranks = {name: changes.parts[name].rank for name in factors}
    places = dict(factors.items())
    named = [name for name in inputs.template.tensors if name in saved or name in biases]
    moved = sum(part.norm for part in changes.parts.values())
    lost = sum(changes.parts[name].lost for name in factors)
    return WrittenAdapter(
        _config(changes, task, places, ranks, sorted(modules), bool(biases)),
        sorted(entries),
        {name: changes.parts[name].share for name in factors},
        lost / moved if moved else 0.0,
        [name for name in named if changes.parts[name].norm > 0],
        ranks,
    )


def _config(
    changes: Changes,
    task: str | None,
    places: dict[str, Place],
    ranks: dict[str, int],
    modules: list[str],
    biases: bool,
) -> dict[str, Any]:
    """adapter_config.json. alpha is the rank everywhere: the scale is 1 for whoever reads rank_pattern or not."""
    rank = max(ranks.values(), key=list(ranks.values()).count)
    pattern = {places[name].module: own for name, own in ranks.items() if own != rank}
    base = changes.base.hub_id.partition("@")[0] if changes.base.hub_id else None
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base or str((changes.base.folder or changes.base.files()[0]).absolute()),
        "r": rank,
        "lora_alpha": rank,
        "rank_pattern": pattern,
        "alpha_pattern": pattern,
        "target_modules": changes.layout.targets(places),
        "modules_to_save": modules or None,
        "bias": "all" if biases else "none",
        "fan_in_fan_out": any(place.kind == "conv1d" for place in places.values()),
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
