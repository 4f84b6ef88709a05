"""The rooms of the package, and which may know of which."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "gradmerge"

#: Open to all but the rules. They import no room.
OPEN = {"arguments", "display", "errors", "notes", "progress", "text", "quiet", "_version"}
#: What each room may import besides.
MAY_IMPORT: dict[str, set[str]] = {
    "rules": set(),
    "storage": set(),
    "curvature": {"rules", "storage"},
    "checkpoints": {"rules", "storage"},
    "recipe": {"rules"},
    "engine": {"rules", "storage", "curvature", "checkpoints", "recipe"},
    "tasks": {"rules", "storage", "curvature", "checkpoints"},
    "training": {"rules", "storage", "curvature", "checkpoints", "tasks"},
    "diagnostics": {"rules", "storage", "curvature", "checkpoints", "recipe", "engine", "tasks"},
    "report": {"rules", "storage", "curvature", "checkpoints", "recipe", "engine", "tasks", "diagnostics"},
}
MAY_IMPORT["api"] = {*MAY_IMPORT}
MAY_IMPORT["demo"] = {*MAY_IMPORT}
MAY_IMPORT["cli"] = {*MAY_IMPORT}


def imports_of(path: Path) -> set[str]:
    """The rooms of ours that a module imports."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gradmerge.")}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("gradmerge"):
            found.add((node.module or "").split(".")[1])
    return found


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_imports_point_downwards(room: str) -> None:
    paths = sorted((PACKAGE / room).glob("*.py")) or [PACKAGE / f"{room}.py"]
    allowed = MAY_IMPORT[room] | {room} | (set() if room == "rules" else OPEN)
    for path in paths:
        assert imports_of(path) <= allowed, path.name


def test_every_room_is_known() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert found - {"__init__", "__main__"} == MAY_IMPORT.keys() | OPEN
    for name in OPEN:
        assert imports_of(PACKAGE / f"{name}.py") <= OPEN, name
