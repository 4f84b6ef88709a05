"""The report as a file: what is in it, what is beside it, and what cannot get in."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

from gradmerge.report.figures import Series, bars, curves
from gradmerge.report.page import Figure, Page, Section, Table, columns_of, digest, html, library, write_report
from gradmerge.text import Measured

VOID = {"meta", "br", "img", "link", "input", "hr"}


def small_page(name: str = "ours") -> Page:
    line = curves([Series(name, [0, 1], [0.5, 0.25], [name, name])], "λ", "loss (nats)")
    figures = [Figure(f"Sweep of {name}", "sweep", line)]
    figures.append(Figure("Loss", "loss", bars([name], {name: [0.5]}, "loss (nats)")))
    table = Table(
        "Best", "best", ["method", "λ", "loss (nats)"], [[name, 0.5, 0.25], ["ties", 1.0, None]], f"Of {name}."
    )
    sections = [Section("Sweep", f"About {name}.\n\nAnd **more**.", figures, [table]), Section(name)]
    return Page(
        f"Report of {name}", name, [f"Take {name}.", "Or not."], sections, f"method: {name}\n", {"recipe": name}, [name]
    )


class Outline(HTMLParser):
    """Tags and text of a page; fails where an end does not meet its start."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def scripts(text: str) -> list[str]:
    """What a browser would run."""
    return re.findall(r"<script>(.*?)</script>", text, re.S)


def test_a_report_has_the_numbers_of_its_figures_and_tables_beside_it(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "new" / "out", small_page())
    assert [p.name for p in paths] == ["report.html", "sweep.csv", "loss.csv", "best.csv"]
    assert sorted(paths) == sorted((tmp_path / "new" / "out").iterdir())
    assert html(small_page()) == html(small_page())
    links = [a["href"] for tag, a in Outline(paths[0].read_text()).tags if tag == "a"]
    assert all(str(link).startswith("#") for link in links), "a report that is mailed alone has nothing beside it"


def test_a_report_needs_nothing_from_elsewhere() -> None:
    text = html(small_page())
    for tag, attributes in Outline(text).tags:
        assert tag not in ("link", "img", "iframe", "object") and "src" not in attributes, tag
    ours = text.replace(library(), "")
    assert not re.search(r"url\((?!#)|@import|https?://", ours)


def test_the_policy_names_every_script_and_the_library_is_there_once() -> None:
    text = html(small_page())
    policy = next(a["content"] for tag, a in Outline(text).tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and "eval" not in policy and "unsafe-inline'; script" in policy
    named = re.search(r"script-src ([^;]*);", policy)
    assert named and named[1].split() == [f"'{digest(script)}'" for script in scripts(text)]
    assert text.count(library()) == 1 and len(scripts(text)) == 3
    assert library() not in html(Page("t", "", [], [Section("s")], "", {})), "no figure, no library"


def test_a_report_has_no_secrets_of_urls(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "out", small_page("https://me:geheim@host/model?signature=geheim"))
    assert len(paths) == 4 and not [path for path in paths if b"geheim" in path.read_bytes()]


def test_names_of_files_are_safe_and_differ(tmp_path: Path) -> None:
    tables = [Table("t", slug, ["a"], [["b"]]) for slug in ("../x", "A b/c", "a-b-c", "", "report", "x" * 300)]
    paths = write_report(tmp_path / "out", Page("t", "", [], [Section("s", tables=tables)], "", {}))
    assert [p.name for p in paths[1:6]] == ["x.csv", "a-b-c.csv", "a-b-c-2.csv", "figure.csv", "report-2.csv"]
    assert {p.parent for p in paths} == {tmp_path / "out"} and len(paths) == 7


def test_a_standard_error_stands_beside_its_number_and_has_a_column_of_its_own_in_csv() -> None:
    table = Table("T", "t", ["name", "accuracy"], [["a", Measured(0.9, 0.0123)], ["b", 0.75], ["c", None]])
    (_, shown) = columns_of(table)
    assert [cell.text for cell in shown.cells] == ["0.9 ± 0.012", "0.75", "–"] and shown.numeric
    assert [cell.full for cell in shown.cells[:2]] == ["0.9", "0.75"], "what is sorted by"
    assert table.csv().splitlines() == [
        'name,accuracy,"accuracy, standard error"',
        "a,0.9,0.0123",
        "b,0.75,",
        "c,,",
    ]
