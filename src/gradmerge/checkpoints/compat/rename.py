"""Models whose tensors have other names than the base's: `rename:` of a recipe, and what to write there."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ...errors import InputError
from ...text import listed, nearest
from ..checkpoint import Checkpoint
from ..views import View


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """The name with the first prefix that fits replaced."""
    found = next((prefix for prefix in rename if name.startswith(prefix)), None)
    return name if found is None else rename[found] + name[len(found) :]


class RenamedCheckpoint(View):
    """A checkpoint whose tensors have other prefixes to their names."""

    def __init__(self, inner: Checkpoint, rename: Mapping[str, str], where: str = "rename") -> None:
        self._rename = dict(rename)
        for prefix in rename:
            if not any(name.startswith(prefix) for name in inner.tensors):
                raise InputError(
                    f"{where}: no tensor of {inner.label} begins with {prefix!r}{nearest(prefix, _beginnings(inner))}"
                )
        stored = {renamed(name, rename): name for name in inner.tensors}
        if len(stored) < len(inner.tensors):
            counts = Counter(renamed(name, rename) for name in inner.tensors)
            twice = [name for name, count in counts.items() if count > 1]
            raise InputError(f"{where}: tensors of {inner.label} would have one name:\n{listed(twice)}")
        super().__init__(inner, stored)
        for part in {new for new in rename.values() if new.endswith("/")}:  # a part of a model that lies in folders
            self.config = {f"{part.removesuffix('/')}_config": inner.config}

    def new_name(self, name: str) -> str:
        """The name here of a tensor, or of what belongs to it, that has another in the files."""
        return renamed(name, self._rename)


def rename_hint(first: Checkpoint, other: Checkpoint, missing: Sequence[str]) -> str:
    """What to write into the recipe where names differ by a leading part alone, as of a model and of a tower."""
    by_end: dict[str, list[str]] = defaultdict(list)
    for name in other.tensors:
        if name not in first.tensors:
            for end in _ends(name):
                by_end[end].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        end = next((end for end in _ends(name) if end in by_end), "")
        candidates = [c for c in by_end.get(end, []) if other.tensors[c].shape == first.tensors[name].shape]
        if len(candidates) == 1:
            votes[candidates[0].removesuffix(end), name.removesuffix(end)] += 1
    if not votes:
        return ""
    (theirs, ours), count = votes.most_common(1)[0]
    unknown = [name for name in other.tensors if name not in first.tensors]
    if count <= min(len(missing), len(unknown)) // 2:
        return ""
    rename = {theirs: ours}
    there = {renamed(name, rename) for name in other.tensors}
    hint = (
        f"The names differ by a leading part. Write in the recipe, under this model:\n    rename: {json.dumps(rename)}"
    )
    if ours and any(name not in there for name in missing):
        hint += f"\n  and, to merge only that part, at the top level:\n    include: {json.dumps([f'{ours}*'])}"
    return hint


def _beginnings(checkpoint: Checkpoint) -> set[str]:
    """What names begin with, up to each dot or slash."""
    return {name[: place + 1] for name in checkpoint.tensors for place, letter in enumerate(name) if letter in "./"}


def _ends(name: str) -> list[str]:
    """The name, and what is left of it after each dot or slash, the longest first."""
    return [name] + [name[place + 1 :] for place, letter in enumerate(name) if letter in "./"]
