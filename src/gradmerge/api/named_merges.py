"""Named recipes, made before the one that uses them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from ..engine.input_state import recipe_paths
from ..engine.run.merge import MergeResult
from ..errors import InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import local_path
from ..notes import Note
from ..recipe import Recipe


@contextlib.contextmanager
def with_named_merges(
    recipe: Recipe, out: Path | None, make: Callable[[Recipe, Path], MergeResult], *, resume: bool = False
) -> Iterator[Recipe]:
    """A recipe whose named recipes have been merged, each with ``make``; in the end their results are removed.

    They lie in a folder beside OUT. With ``resume``, what an earlier run left there is gone on with, and an error
    leaves it there.
    """
    if not recipe.merges or recipe.made:
        yield recipe
        return
    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradmerge-"))) / "out"
        place = out.with_name(f"{out.name}.named")
        reads = [path for one in recipe.merges.values() for path in recipe_paths(one)]
        staging = stack.enter_context(AtomicDir(place, "named merges", resume=resume, reads=reads))
        staging.keep, staging.temporary = resume, True
        made: dict[str, Path] = {}
        notes = list(recipe.notes)
        for number, (name, one) in enumerate(recipe.merges.items(), 1):
            folder = staging.folder / f"{number}"
            notes += make(one.with_made(made), folder).notes
            made[name] = folder
        yield recipe.with_made(made, notes)


def with_stand_ins(recipe: Recipe) -> Recipe:
    """A recipe that can be planned before its named ones are merged: each by the model that it starts from."""
    if not recipe.merges or recipe.made:
        return recipe
    stand_ins: dict[str, str] = {}
    notes = list(recipe.notes)
    for name, one in recipe.merges.items():
        if one.slices or one.tokenizer is not None:
            raise InputError(f"{name}: makes tensors of other shapes, so that what uses it is planned once it is made")
        first = one.references[0]
        stand_ins[name] = stand_ins.get(first) or str(local_path(first, one.folder))
        notes.append(Note(f"{name}: is merged first; in this plan {first} stands for it"))
    return recipe.with_made({name: Path(text) for name, text in stand_ins.items()}, notes)
