"""gradmerge.json: what a merge was made of, so that it can be made again and be checked."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..checkpoints.lora import AdapterCheckpoint
from ..checkpoints.model import Buffers, Checkpoint, Digest, block_digest
from ..checkpoints.naming import stored_name
from ..recipe import Recipe, plain
from ..storage.tensorfile import TensorInfo
from .inputs import Inputs, Source
from .penalties import used
from .plan import BLOCK, Plan


def merge_record(
    recipe: Recipe,
    plan: Plan,
    fingerprint: str,
    sizes: Mapping[str, int],
    digests: Mapping[int, list[int]],
    timings: Mapping[str, float],
    resumed: int,
) -> dict[str, Any]:
    """The record of a merge. ``digests`` holds, per unit, one number for each of the plan's sources (-1: not read)."""
    merged = len(plan.merged)
    return {
        "gradmerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": fingerprint,
        "recipe": recipe.model_dump(mode="json")
        | {"options": {name: plain(value) for name, value in plan.inputs.options.items()}},
        **used(recipe, plan),
        "inputs": [_input_record(plan, place, source, digests) for place, source in enumerate(plan.inputs.sources)],
        "output": {
            "files": [name for name in sizes if not name.startswith("curvature/")],
            "sizes": dict(sizes),
            "bytes": plan.total_written,
            "merged_tensors": merged,
            "copied_tensors": len(plan.jobs) - merged,
        },
        "versions": {
            "gradmerge": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
        },
        "timings": {name: round(value, 3) for name, value in timings.items()},
        "resumed_blocks": resumed,
        "notes": plan.notes,
    }


def _input_record(plan: Plan, place: int, source: Source, digests: Mapping[int, list[int]]) -> dict[str, Any]:
    record: dict[str, Any] = {"role": _role(source, plan.inputs), "source": source.label}
    if isinstance(source, Checkpoint) and source.hub_id:
        record["hub_id"] = source.hub_id
    record["files"] = [{"name": path.name, "bytes": path.stat().st_size} for path in source.files()]
    digest = _digest_of_source(plan, place, source, digests)
    if len(digest):
        record["digest"] = f"xxh3-128:{digest.hex()}"
        record["digest_tensors"] = len(digest)
        record["digest_block"] = digest.block_size
    return record


def _digest_of_source(plan: Plan, place: int, source: Source, digests: Mapping[int, list[int]]) -> Digest:
    """From the blocks' digests, as far as the merge has read the source; whole matrices are digested now."""
    if isinstance(source, AdapterCheckpoint):
        return digest_of(source, plan.block)
    digest, buffers = Digest(plan.block), Buffers()
    for unit in plan.units():
        name, layer = unit.job.name, unit.job.layer
        if isinstance(source, Checkpoint):
            name = plan.inputs.stored_name(source, name)
            info = source.tensors.get(name)
        else:
            info = TensorInfo("F32", unit.job.info.shape)
        value = digests[unit.number][place]
        read = source in plan.inputs.tuned or layer is not None
        if info is not None and unit.job.whole and isinstance(source, Checkpoint) and read:
            _add_tensor(digest, source, name, buffers)
            if layer is not None and layer.bias is not None:
                _add_tensor(digest, source, plan.inputs.stored_name(source, layer.bias.name), buffers)
        elif info is not None and value >= 0:
            digest.add(stored_name(source, name), info, unit.start, value)
    return digest


def _role(source: Source, inputs: Inputs) -> str:
    roles: dict[Source | None, str] = {inputs.base: "base", inputs.prior: "base curvature"}
    roles |= dict.fromkeys(inputs.penalty, "penalty")
    return roles.get(source, "tuned" if isinstance(source, Checkpoint) else "curvature")


def _add_tensor(digest: Digest, checkpoint: Checkpoint, name: str, buffers: Buffers) -> None:
    info, block = checkpoint.tensors[name], digest.block_size
    for start in range(0, max(info.numel, 1), block):
        values = checkpoint.read(name, start, min(start + block, info.numel), buffers)
        digest.add(stored_name(checkpoint, name), info, start, block_digest(values))


def digest_of(checkpoint: Checkpoint, block: int = BLOCK) -> Digest:
    """The digest of all tensors of a checkpoint (an adapter's own), as `gradmerge.json` records it for every input."""
    if isinstance(checkpoint, AdapterCheckpoint):
        checkpoint = checkpoint.adapter
    digest, buffers = Digest(block), Buffers()
    for name in checkpoint.tensors:
        _add_tensor(digest, checkpoint, name, buffers)
    return digest
