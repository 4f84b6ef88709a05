"""gradmerge.json: what a merge was made of, so that it can be made again and be checked."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..checkpoints.lora import AdapterCheckpoint
from ..checkpoints.model import Buffers, Checkpoint, Digest, block_digest
from ..checkpoints.naming import stored_name
from ..checkpoints.stacked import StackedCheckpoint
from ..checkpoints.vocabulary import VocabularyCheckpoint, stored
from ..recipe import Recipe, plain
from ..storage.tensorfile import TensorInfo
from .inputs import Inputs, Source
from .penalties import used
from .plan import BLOCK, Plan
from .slicing import layer_table


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
    options = {name: plain(value) for name, value in plan.inputs.options.items()}
    return {
        "gradmerge": __version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "fingerprint": fingerprint,
        "recipe": recipe.model_dump(mode="json") | ({} if recipe.slices else {"options": options}),
        **({"merges": {n: one.model_dump(mode="json") for n, one in recipe.merges.items()}} if recipe.merges else {}),
        **used(recipe, plan),
        **({"layers": layer_table(recipe)} if recipe.slices else {}),
        "inputs": [_input_record(plan, source, digests) for source in _recorded(plan.inputs.sources)],
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


def _recorded(sources: Sequence[Source]) -> Iterator[Source]:
    """What was read, each once: of stacked layers the models that they are of."""
    yield from dict.fromkeys(
        part for source in sources for part in (source.parts if isinstance(source, StackedCheckpoint) else [source])
    )


def _input_record(plan: Plan, source: Source, digests: Mapping[int, list[int]]) -> dict[str, Any]:
    record: dict[str, Any] = {"role": _role(source, plan.inputs), "source": source.label}
    if isinstance(source, Checkpoint) and source.hub_id:
        record["hub_id"] = source.hub_id
        from ..storage.remote import commit_of

        if source.folder is not None and (commit := commit_of(source.folder)) is not None:
            record["commit"] = commit
    record["files"] = [{"name": path.name, "bytes": path.stat().st_size} for path in source.files()]
    digest = _digest_of_source(plan, source, digests)
    if len(digest):
        record["digest"] = f"xxh3-128:{digest.hex()}"
        record["digest_tensors"] = len(digest)
        record["digest_block"] = digest.block_size
    return record


def _digest_of_source(plan: Plan, source: Source, digests: Mapping[int, list[int]]) -> Digest:
    """From the blocks' digests, as far as the merge has read the source; whole matrices are digested now."""
    whole = stored(source) if isinstance(source, Checkpoint) else source
    if isinstance(whole, AdapterCheckpoint):
        return digest_of(whole, plan.block)
    if source not in plan.inputs.sources:
        assert isinstance(source, Checkpoint)
        return _digest_of_part(plan, source, digests)
    place = plan.inputs.sources.index(source)
    digest, buffers = Digest(plan.block), Buffers()
    for unit in plan.units():
        name, layer = unit.job.name, unit.job.layer
        if isinstance(source, Checkpoint):
            name = plan.inputs.stored_name(source, name)
            info = source.tensors.get(name)
        else:
            info = TensorInfo("F32", unit.job.info.shape)
        value = digests[unit.number][place]
        based = source is plan.inputs.base and "base" in plan.needs and not unit.job.solved
        read = source in plan.inputs.tuned or layer is not None or based
        apart = unit.job.rule is not None and plan.cut_otherwise(unit.job)
        if isinstance(source, Checkpoint) and _has_own_rows(source, name):
            if unit.start == 0 and (value >= 0 or (apart and read)):
                _add_as_stored(digest, source, name, buffers)
        elif info is not None and apart and isinstance(source, Checkpoint) and read:
            if unit.start == 0:
                _add_tensor(digest, source, name, buffers)
            if layer is not None and layer.bias is not None:
                _add_tensor(digest, source, plan.inputs.stored_name(source, layer.bias.name), buffers)
        elif info is not None and value >= 0:
            digest.add(stored_name(source, name), info, unit.start, value)
    return digest


def _has_own_rows(source: Checkpoint, name: str) -> bool:
    """Whether a tensor is read in another order of its rows than it is stored in."""
    return isinstance(source, VocabularyCheckpoint) and name in source.moved


def _add_as_stored(digest: Digest, source: Checkpoint, name: str, buffers: Buffers) -> None:
    """A tied head that is not stored is its embedding, and left out."""
    if name in stored(source).tensors:
        _add_tensor(digest, stored(source), name, buffers)


def _digest_of_part(plan: Plan, part: Checkpoint, digests: Mapping[int, list[int]]) -> Digest:
    """The same of a model whose layers were stacked; a layer may have been read several times."""
    digest, buffers = Digest(plan.block), Buffers()
    for place, stack in enumerate(plan.inputs.sources):
        for unit in plan.units() if isinstance(stack, StackedCheckpoint) and part in stack.parts else ():
            assert isinstance(stack, StackedCheckpoint)
            holder, name = stack.places.get(plan.inputs.stored_name(stack, unit.job.name), (None, ""))
            value = digests[unit.number][place]
            if holder is part and _has_own_rows(part, name):
                if unit.start == 0 and (value >= 0 or unit.job.whole):
                    _add_as_stored(digest, part, name, buffers)
            elif holder is part and unit.job.whole:
                _add_tensor(digest, part, name, buffers)
            elif holder is part and value >= 0:
                digest.add(name, part.tensors[name], unit.start, value)
    return digest


def _role(source: Source, inputs: Inputs) -> str:
    if isinstance(inputs.base, StackedCheckpoint) and source in inputs.base.parts:
        return "base"
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
