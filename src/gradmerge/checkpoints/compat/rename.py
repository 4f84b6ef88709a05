"""Models whose tensors have other prefixes than the base's: `rename:` of a recipe, and a hint what to write there."""

from __future__ import annotations

import json
import re
from collections import Counter
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
                raise InputError(
                    f"{where}: no tensor of {inner.label} begins with {prefix!r}{nearest(prefix, inner.tensors)}"
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
    if not missing or not unknown:
        return ""
    fewer, more = sorted((missing, unknown), key=len)
    ending = max((_common_ending(fewer[0], name) for name in more), key=len)
    theirs, ours = (next(n for n in names if n.endswith(ending)).removesuffix(ending) for names in (unknown, missing))
    new_names = {renamed(name, {theirs: ours}) for name in other.tensors}
    if 2 * len(new_names.intersection(missing)) <= len(fewer):
        return ""
    rename = json.dumps({theirs: ours})
    hint = f"The names differ by a prefix. Write in the recipe, under this model:\n    rename: {rename}"
    if ours and not new_names.issuperset(missing):
        hint += f"\n  and, to merge only that part, at the top level:\n    include: {json.dumps([f'{ours}*'])}"
    return hint


def _common_ending(one: str, two: str) -> str:
    """Return the longest ending that two names share, from a dot or slash on."""
    endings = [one, *(one[separator.end() :] for separator in re.finditer("[./]", one))]
    return next((end for end in endings if two == end or two.endswith((f".{end}", f"/{end}"))), "")
