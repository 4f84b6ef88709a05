"""The report as a file: what is in it, what is beside it, and what cannot get in."""

from __future__ import annotations

import csv
import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradmerge.errors import MachineError
from gradmerge.report.charts import BarChart, HeatMap, LineChart, ScatterChart, Series
from gradmerge.report.page import Page, Section, Table, html, rich, write_report

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&`**"
VOID = {"meta", "br", "img", "link", "input", "hr"}


def small_page(name: str = "ours") -> Page:
    chart = LineChart(
        f"Sweep of {name}", "sweep", "λ", "loss (nats)", [Series(name, [0, 1], [0.5, 0.25], [name, name])]
    )
    bars = BarChart("Loss", "loss", "loss (nats)", [name], {name: [0.5]})
    table = Table(
        "Best", "best", ["method", "λ", "loss (nats)"], [[name, 0.5, 0.25], ["ties", 1.0, None]], f"Of {name}."
    )
    sections = [Section("Sweep", f"About {name}.\n\nAnd **more**.", [chart, bars], [table]), Section(name)]
    return Page(
        f"Report of {name}", name, [f"Take {name}.", "Or not."], sections, f"method: {name}\n", {"recipe": name}, [name]
    )


class Outline(HTMLParser):
    """Tags and text of a page; fails where an end does not meet its start."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
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

    def handle_data(self, data: str) -> None:
        self.words += data


def test_a_report_has_its_figures_and_tables_beside_it(tmp_path: Path) -> None:
    paths = write_report(tmp_path / "new" / "out", small_page())
    assert [p.name for p in paths] == ["report.html", "sweep.svg", "sweep.csv", "loss.svg", "loss.csv", "best.csv"]
    assert sorted(paths) == sorted((tmp_path / "new" / "out").iterdir())
    ET.parse(tmp_path / "new" / "out" / "sweep.svg")
    links = [a["href"] for tag, a in Outline(paths[0].read_text()).tags if tag == "a"]
    assert {str(link) for link in links if not str(link).startswith("#")} == {p.name for p in paths[1:]}


def test_a_report_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    text = html(small_page())
    for tag, attributes in Outline(text).tags:
        assert tag not in ("link", "img", "iframe", "object") and "src" not in attributes, tag
    assert not re.search(r"url\((?!#)|@import|https?://", text)


def test_names_cannot_become_markup(tmp_path: Path) -> None:
    for path in write_report(tmp_path, small_page(NASTY)):
        if path.suffix == ".svg":
            ET.parse(path)
    text = (tmp_path / "report.html").read_text()
    nasty, plain = Outline(text), Outline(html(small_page()))
    for tag, attributes in nasty.tags:
        assert tag != "img" and not any(name.startswith("on") for name in attributes)
    count = [sum(tag == "script" for tag, _ in outline.tags) for outline in (nasty, plain)]
    assert count == [1, 1]
    assert NASTY in nasty.words


def test_columns_notes_and_the_names_of_facts_cannot_become_markup() -> None:
    cell, long = f"{NASTY}\x1b[1m", "x" * 60 + NASTY.replace(" ", "")
    table = Table(NASTY, NASTY, [NASTY, "n"], [[cell, 1.0], [long, None]], f"**{NASTY}")
    outline = Outline(html(Page("t", "", [], [Section("s", tables=[table])], "", {NASTY: NASTY})))
    assert sum(tag in ("script", "img") for tag, _ in outline.tags) == 1
    assert not any(name.startswith("on") for _, attributes in outline.tags for name in attributes)
    assert f"{NASTY}\\x1b[1m" in outline.words
    assert {a["title"] for tag, a in outline.tags if tag == "td" and "title" in a} == {long}


def test_paragraphs_know_bold_and_code_and_nothing_else() -> None:
    assert rich("a **b** `c **d**` <i>") == "a <strong>b</strong> <code>c **d**</code> &lt;i&gt;"
    assert rich("2 ** 3 ** 4 `") == "2 ** 3 ** 4 `"
    assert html(small_page()).count("<p>And <strong>more</strong>.</p>") == 1


def test_the_same_page_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two = write_report(tmp_path / "1", small_page()), write_report(tmp_path / "2", small_page())
    assert [p.read_bytes() for p in one] == [p.read_bytes() for p in two]


def test_names_of_files_are_safe_and_differ(tmp_path: Path) -> None:
    tables = [Table("t", slug, ["a"], [["b"]]) for slug in ("../x", "A b/c", "a-b-c", "", "report", "x" * 300)]
    paths = write_report(tmp_path / "out", Page("t", "", [], [Section("s", tables=tables)], "", {}))
    assert [p.name for p in paths[1:6]] == ["x.csv", "a-b-c.csv", "a-b-c-2.csv", "figure.csv", "report-2.csv"]
    assert {p.parent for p in paths} == {tmp_path / "out"} and len(paths) == 7


def test_charts_with_the_same_slug_do_not_share_ids() -> None:
    bars = [BarChart(f"t{i}", "same", "y", ["a"], {"m": [1.0], "n": [2.0]}) for i in range(2)]
    ids = [a["id"] for _, a in Outline(html(Page("t", "", [], [Section("s", "", bars)], "", {}))).tags if "id" in a]
    assert len(ids) == len(set(ids))


def test_one_chart_may_be_shown_twice() -> None:
    bars = BarChart("t", "same", "y", ["a"], {"m": [1.0], "n": [2.0]})
    ids = [
        a["id"] for _, a in Outline(html(Page("t", "", [], [Section("s", "", [bars, bars])], "", {}))).tags if "id" in a
    ]
    assert len(ids) == len(set(ids))


def test_a_table_shows_four_digits_and_keeps_all() -> None:
    table = Table("t", "t", ["name", "v"], [["a", 1 / 3], ["b", None], ["c", float("nan")]])
    text = html(Page("t", "", [], [Section("s", tables=[table])], "", {}))
    assert f'data-v="{1 / 3!r}">0.3333<' in text and '<td class="none num">–</td>' in text
    rows = list(csv.reader(io.StringIO(table.csv())))
    assert rows == [["name", "v"], ["a", repr(1 / 3)], ["b", ""], ["c", "nan"]]


def test_a_row_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="t: a row has 3 values for 2 columns"):
        Table("t", "t", ["a", "b"], [[1, 2, 3]])


def test_an_empty_page_is_a_page() -> None:
    empty = Table("t", "t", ["a"], [])
    Outline(html(Page("", "", [], [], "", {})))
    Outline(html(Page("t", "", [], [Section("s", tables=[empty])], "", {})))


def test_a_large_report_stays_small() -> None:
    rows = [f"model.layers.{i}.self_attn" for i in range(200)]
    heat = HeatMap(
        "h",
        "h",
        rows,
        [f"task {j}" for j in range(8)],
        [[1e-5 * (i * 7919 % 211 + j) for j in range(8)] for i in range(200)],
        "v",
    )
    xs = [i / 10 for i in range(16)]
    curves = [Series(f"method {s} on a task", xs, [0.1234567 * (x + s) for x in xs]) for s in range(5)]
    lines = [LineChart(f"l{i}", f"l{i}", "scaling factor", "loss (nats)", curves, [("base", 0.5)]) for i in range(10)]
    scatter = ScatterChart("s", "s", "x", "y", curves)
    page = Page("t", "s", ["v"], [Section("a", "", [heat, *lines, scatter])], "", {})
    assert len(html(page).encode()) < 400_000


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "report.html").write_text("old")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(MachineError, match="No space left"):
        write_report(tmp_path, small_page())
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_folder_that_cannot_be_made_is_the_machine_s_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be made"):
        write_report(tmp_path / "file" / "out", small_page())
