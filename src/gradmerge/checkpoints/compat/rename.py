"""Models whose tensors have other prefixes than the base's: `rename:` of a recipe, and a hint what to write there."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from ...errors import InputError
from ...text import listed, nearest
from ..checkpoint import Checkpoint, View


def renamed(name: str, rename: Mapping[str, str]) -> str:
    """Replace the first prefix that matches."""
    prefix = next((prefix for prefix in rename if name.startswith(prefix)), None)
    return name if prefix is None else rename[prefix] + name[len(prefix) :]


class RenamedCheckpoint(View):
    """A checkpoint whose tensors get other prefixes."""

    def __init__(self, inner: Checkpoint, rename: Mapping[str, str], where: str = "rename") -> None:
        self._rename = dict(rename)
        for prefix in rename:
            if not any(name.startswith(prefix) for name in inner.tensors):
                prefixes = {beginning for name in inner.tensors for beginning, _ in _splits(name)}
                raise InputError(
                    f"{where}: no tensor of {inner.label} begins with {prefix!r}{nearest(prefix, prefixes)}"
                )
        counts = Counter(renamed(name, rename) for name in inner.tensors)
        twice = [name for name, number in counts.items() if number > 1]
        if twice:
            raise InputError(f"{where}: several tensors of {inner.label} would get the same name:\n{listed(twice)}")
        super().__init__(inner, {renamed(name, rename): name for name in inner.tensors})
        for folder in {new for new in rename.values() if new.endswith("/")}:  # the model is a part of a pipeline
            self.config = {f"{folder.removesuffix('/')}_config": inner.config}

    def new_name(self, name: str) -> str:
        """Return the new name of a tensor, or of something that belongs to it."""
        return renamed(name, self._rename)


def rename_hint(first: Checkpoint, other: Checkpoint, missing: Sequence[str]) -> str:
    """Return advice if the names differ only by a prefix, such as those of a language model and of a VLM's part."""
    unknown = [name for name in other.tensors if name not in first.tensors]
    by_ending: dict[str, list[str]] = defaultdict(list)
    for name in unknown:
        for _, ending in [("", name), *_splits(name)]:
            by_ending[ending].append(name)
    votes: Counter[tuple[str, str]] = Counter()
    for name in missing:
        ending = next((ending for _, ending in [("", name), *_splits(name)] if ending in by_ending), "")
        candidates = [c for c in by_ending.get(ending, []) if other.tensors[c].shape == first.tensors[name].shape]
        if len(candidates) == 1:
            votes[candidates[0].removesuffix(ending), name.removesuffix(ending)] += 1
    if not votes:
        return ""
    (theirs, ours), number = votes.most_common(1)[0]
    if number <= min(len(missing), len(unknown)) // 2:
        return ""
    rename = {theirs: ours}
    hint = f"The names differ by a prefix. Write in the recipe, under this model:\n    rename: {json.dumps(rename)}"
    new_names = {renamed(name, rename) for name in other.tensors}
    if ours and any(name not in new_names for name in missing):
        hint += f"\n  and, to merge only that part, at the top level:\n    include: {json.dumps([f'{ours}*'])}"
    return hint


def _splits(name: str) -> list[tuple[str, str]]:
    """Return every way to split a name after a dot or a slash, the shortest beginning first."""
    return [(name[: i + 1], name[i + 1 :]) for i, letter in enumerate(name) if letter in "./"]
