"""The pages of the documentation: what the program writes into them, and whether they can be read where they lie."""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest
from docs.pages import BEGIN, DOCS, FOLDERS, GENERATED, filled, pages

ROOT = DOCS.parent
PAGES = sorted([*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
#: Packages whose own words stand in generated parts.
QUOTED = ("pydantic", "typer")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_generated_parts_say_what_the_program_says(page: Path) -> None:
    pins = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    if others := [f"{name} {version(name)}" for name in QUOTED if version(name) != pins[name]]:
        pytest.skip(f"pages are generated with the versions in constraints.txt, and here is {', '.join(others)}")
    text = page.read_text("utf-8")
    assert filled(text) == text, f"{name_of(page)} has fallen behind the program: run `make pages` and commit the page"


def test_every_generated_part_stands_on_one_page() -> None:
    found = [name for page in pages() for name in BEGIN.findall(page.read_text("utf-8"))]
    assert sorted(found) == sorted(GENERATED)


def test_a_part_that_is_filled_replaces_what_was_there_and_nothing_else() -> None:
    page = "Before.\n\n<!-- generated: metrics -->\nold\n<!-- end of generated -->\n\nAfter.\n"
    once = filled(page)
    assert once.startswith("Before.\n\n<!-- generated: metrics -->\n\n| metric | meaning |\n")
    assert once.endswith("|\n\n<!-- end of generated -->\n\nAfter.\n") and "old" not in once
    assert filled(once) == once


def test_a_part_without_an_end_is_refused() -> None:
    page = "<!-- generated: metrics -->\n\nText.\n\n<!-- generated: columns -->\n<!-- end of generated -->\n"
    with pytest.raises(ValueError, match="end of generated"):
        filled(page)


def anchor(heading: str) -> str:
    """The name that GitHub gives a heading."""
    words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_within_the_repository_lead_somewhere(page: Path) -> None:
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, place = link.partition("#")
        if "://" in link:
            continue
        target = page.parent / path if path else page
        anchors = re.findall(r"^#+ (.*)$", text_of(target), re.MULTILINE) if target.suffix == ".md" else []
        if not target.exists() or (place and place not in map(anchor, anchors)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_page_uses_what_github_does_not_show(page: Path) -> None:
    shown = re.sub(r"<!--.*?-->", "", text_of(page), flags=re.DOTALL)
    assert re.findall(r"^(?:!!!|\?\?\?|:::|===) .*$", shown, re.MULTILINE) == []


def test_the_messages_of_the_troubleshooting_page_exist() -> None:
    source = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # a string over several lines
    source = re.sub(r"\{[^{}]*\}", "…", source)
    rows = re.findall(r"^\| ([^`|]+) \| [^|]+ \|$", text_of(DOCS / "troubleshooting.md"), re.MULTILINE)
    messages = [row for row in rows if row not in ("message", "---")]
    assert len(messages) > 12
    assert [m for m in messages if not all(part.strip() in source for part in m.split("…"))] == []
