"""Write the record and the model card of a finished merge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..cards.card import merge_text, recipe_text, write_card
from ..cards.metadata import read_all_metadata, read_metadata
from ..cards.provenance import base_path, input_entry, model_paths, write_record
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.layers import StackedCheckpoint
from ..io.atomic_dir import AtomicDir
from ..recipe import NONE, Recipe, plain
from ..rules.kronecker_matching import LAYER_DAMPING
from .inputs import CurvatureInput, Inputs, Source
from .plan import Plan

if TYPE_CHECKING:
    from .peft_config import AdapterReport


def write_cards(
    recipe: Recipe,
    plan: Plan,
    folder: AtomicDir,
    *,
    fingerprint: str,
    sizes: Mapping[str, int],
    seconds: float,
    resumed: int,
    report: AdapterReport | None = None,
) -> None:
    """Write gradmerge.json and README.md.

    Args:
        recipe: The recipe.
        plan: Its plan.
        folder: The finished files, under their temporary name.
        fingerprint: What `resume` compares.
        sizes: File → bytes.
        seconds: The duration of the merge.
        resumed: Number of blocks that an earlier run wrote.
        report: For an adapter, its base and what it lacks of the merge.
    """
    inputs = plan.inputs
    options = {} if recipe.slices else {"options": {name: plain(value) for name, value in inputs.options.items()}}
    facts: dict[str, Any] = {
        "fingerprint": fingerprint,
        "recipe": recipe.to_dict() | options,
        "base": base_path(recipe, folder.out),
        "models": model_paths(recipe, folder.out),
        "resumed_blocks": resumed,
        **damping_and_penalties(recipe, plan),
    }
    if recipe.rule.file:
        facts["rule"] = {"file": recipe.rule.file, "sha256": recipe.rule.digest}
    if recipe.merges:
        facts["merges"] = {name: named.to_dict() for name, named in recipe.merges.items()}
    counts = {"merged_tensors": len(plan.merged_tensors), "copied_tensors": plan.copied_tensors}
    write_record(
        folder.folder,
        facts,
        inputs=_input_entries(inputs),
        sizes=sizes,
        timings={"total": seconds},
        notes=plan.notes,
        output=counts | (report.record() if report else {}),
    )
    text, base = merge_text(recipe), report.base if report else None
    write_card(
        folder.folder,
        folder.out.name,
        f"{text}\n\n{report.text}" if report else text,
        read_all_metadata(inputs.checkpoints),
        relation="merge",
        tags=["merge"],
        base=None if base is None else read_metadata(base),
        base_folder=None if base is None else base.folder,
        license=recipe.output.license,
        recipe=recipe_text(recipe),
    )


def damping_and_penalties(recipe: Recipe, plan: Plan) -> dict[str, Any]:
    """Return the damping of the merge and the penalty of every model, for the record."""
    inputs = plan.inputs
    facts: dict[str, Any] = {}
    if "damping" in plan.rule.inputs:
        facts["damping"] = inputs.damping_of(plan.rule)
        if plan.kronecker_jobs and inputs.damps_layers and plan.rule.auto_damping != "mean-curvature":
            facts["damping_of_layers"] = f"{LAYER_DAMPING:g} × the mean curvature of the layer"
    if "penalty" in plan.rule.inputs:
        penalties = inputs.penalty or [None] * len(inputs.tuned)
        facts["penalty"] = [
            {"model": model.label, **_penalty_entry(recipe, penalty)}
            for model, penalty in zip(inputs.tuned, penalties, strict=True)
        ]
    return facts


def _penalty_entry(recipe: Recipe, penalty: CurvatureInput | None) -> dict[str, Any]:
    if penalty is None:
        return {"penalty": "H_0", "from": "default"}
    origin = "recipe" if recipe.base is not None and recipe.base.penalty is not None else "recorded"
    if penalty.constant is None:
        return {"penalty": penalty.label, "from": origin}
    return {"penalty": {"identity": penalty.constant} if penalty.constant else NONE, "from": origin}


def _input_entries(inputs: Inputs) -> list[dict[str, Any]]:
    """One entry for each model and curvature that was read; for stacked layers, the models that they come from."""
    sources: dict[Source, None] = {}
    for source in inputs.sources:
        sources |= dict.fromkeys(source.parts if isinstance(source, StackedCheckpoint) else [source])
    roles: dict[Source | None, str] = {inputs.base: "base", inputs.prior: "base curvature"}
    roles |= dict.fromkeys(inputs.penalty, "penalty")
    if isinstance(inputs.base, StackedCheckpoint):
        roles |= dict.fromkeys(inputs.base.parts, "base")
    entries = []
    for source in sources:
        role = roles.get(source, "tuned" if isinstance(source, Checkpoint) else "curvature")
        hub = (source.hub_id, source.folder) if isinstance(source, Checkpoint) else (None, None)
        entries.append(input_entry(role, source.label, source.files(), *hub))
    return entries
