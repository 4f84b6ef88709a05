"""Where links of a model's folder may lead."""

from __future__ import annotations

import os
from pathlib import Path

from ..errors import InputError


def lies_within(path: Path, folder: Path) -> bool:
    """True if ``path``, with all links followed, lies inside ``folder``.

    Also true where the folder is, or lies in, a snapshot of a Hub cache (…/snapshots/REVISION with …/blobs beside) and
    the file is one of these blobs. The folder may itself be a link.
    """
    try:
        target, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that is none
        return False
    if home in target.parents:
        return True
    return any(
        place.parent.name == "snapshots" and target.parent == place.parent.parent / "blobs"
        for place in (home, *home.parents)
    )


def require_within(path: Path, folder: Path) -> None:
    """Refuse a file that is a link out of its folder: what it leads to is not the model's."""
    if not lies_within(path, folder):
        raise InputError(
            f"{path}: is a link to {os.path.realpath(path)}, which lies outside the model's folder, and is not "
            "followed. Copy the file into the folder, or give the folder that it lies in."
        )
