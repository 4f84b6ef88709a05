"""The rooms of the package, which may know of which, and what keeps them easy to walk through.

The table of rooms in CONTRIBUTING.md is what is enforced: it is read from there.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "gradmerge"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
#: Not rooms: the package itself, and `python -m gradmerge`.
DOORS = {"__init__", "__main__"}
LONGEST = 400


def rooms() -> dict[str, set[str]]:
    """Room → rooms that it may import, as the table has it."""
    table: dict[str, set[str]] = {}
    rows = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \|.*\| ([^|]+) \|$", CONTRIBUTING, re.M)
    for room, allowed in rows:
        known = {"nothing of ours": set(), "all of the above": set(table)}
        table[room] = known.get(allowed, set(re.findall(r"`([a-z_]+)`", allowed)))
    return table


ROOMS = rooms()
#: Open to every room but the rules.
OPEN = set(re.findall(r"`([a-z_]+)\.py`", CONTRIBUTING.partition("Open to all but the rules")[2].partition("\n\n")[0]))
MODULES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


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


def test_every_room_is_in_the_table_of_contributing() -> None:
    assert {room_of(path) for path in MODULES} - OPEN - DOORS == set(ROOMS)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_downwards(room: str) -> None:
    allowed = ROOMS[room] | {room} | (set() if room == "rules" else OPEN)
    for path in MODULES:
        if room_of(path) == room:
            assert imports_of(path) <= allowed, path.relative_to(PACKAGE)


def test_what_is_open_to_all_knows_of_no_room() -> None:
    for path in MODULES:
        if room_of(path) in OPEN:
            assert imports_of(path) <= OPEN, path.name


def test_no_class_has_the_name_of_another() -> None:
    where: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                where[node.name.removeprefix("_")].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


def test_no_module_has_the_name_of_another() -> None:
    """Those of the command line are named after commands, and every package has an ``__init__``."""
    where: dict[str, list[str]] = defaultdict(list)
    for path in MODULES:
        if room_of(path) != "cli" and path.stem not in DOORS:
            where[path.stem].append(str(path.relative_to(PACKAGE)))
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


def test_no_module_is_too_long_to_read() -> None:
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}


def test_experiments_use_the_public_interface() -> None:
    """And the few things of the demonstration that CONTRIBUTING.md names."""
    named = set(re.findall(r"`gradmerge\.([a-z_.]+)", CONTRIBUTING))
    for path in sorted((ROOT / "experiments").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("gradmerge."):
                module = (node.module or "").removeprefix("gradmerge.")
                assert any(f"{module}.{alias.name}".startswith(n) for n in named for alias in node.names), path


def test_the_walks_of_contributing_name_what_is_there() -> None:
    walks = CONTRIBUTING.partition("### One tensor through a merge")[2].partition("### Beside the package")[0]
    steps = re.findall(r"`([a-z]+/[a-z_]+\.py)`(?:\s+`([A-Za-z_.]+)`)?", walks)
    assert len(steps) > 15
    for file, name in steps:
        names: list[ast.stmt] = ast.parse((PACKAGE / file).read_text("utf-8")).body
        for part in name.split(".") if name else []:
            found = [n for n in names if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == part]
            assert found, f"{file} {name}"
            names = found[0].body
