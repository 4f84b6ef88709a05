"""Which package of gradmerge may import which: the rules are read from the table in CONTRIBUTING.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "gradmerge"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
#: Modules of no package: `import gradmerge` and `python -m gradmerge`.
ENTRY_POINTS = {"__init__", "__main__"}


def packages() -> dict[str, set[str]]:
    """Package → packages that it may import, from the table."""
    table: dict[str, set[str]] = {}
    rows = re.findall(r"^\| `([a-z_]+)(?:/|\.py)` \|.*\| ([^|]+) \|$", CONTRIBUTING, re.M)
    for package, allowed in rows:
        known = {"nothing of ours": set(), "all of the above": set(table)}
        table[package] = known.get(allowed, set(re.findall(r"`([a-z_]+)`", allowed)))
    return table


PACKAGES = packages()
#: Shared modules, which every package but `rules` may import.
SHARED = set(re.findall(r"`([a-z_]+)\.py`", CONTRIBUTING.partition("Shared modules, open")[2].partition("\n\n")[0]))
MODULES = sorted(PACKAGE.rglob("*.py"))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """The packages and shared modules of gradmerge that a module imports."""
    found = set()
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth and node.module:
            found.add(node.module.split(".")[0])
        elif isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {alias.name for alias in node.names} - {"__version__"}
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("gradmerge.")}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("gradmerge"):
            found.add((node.module or "").split(".")[1])
    return found


def test_every_package_is_in_the_table_of_contributing() -> None:
    assert {package_of(path) for path in MODULES} - SHARED - ENTRY_POINTS == set(PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_downwards(package: str) -> None:
    allowed = PACKAGES[package] | {package} | (set() if package == "rules" else SHARED)
    for path in MODULES:
        if package_of(path) == package:
            assert imports_of(path) <= allowed, path.relative_to(PACKAGE)


def test_shared_modules_import_no_package() -> None:
    for path in MODULES:
        if package_of(path) in SHARED:
            assert imports_of(path) <= SHARED, path.name


def test_experiments_use_the_public_interface() -> None:
    """And the few internals that CONTRIBUTING.md names."""
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
