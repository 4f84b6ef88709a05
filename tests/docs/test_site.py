"""What the site does beyond its pages: formulas, symbols in the text, and copied commands."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from docs.pages import DOCS

from ..report.conftest import chromium, tab  # noqa: F401

if TYPE_CHECKING:
    from playwright.sync_api import Page as Tab

FORMULAS = {
    f"{page.relative_to(DOCS)}: {formula.strip()}": formula
    for page in sorted(DOCS.rglob("*.md"))
    for formula in re.findall(r"^```math\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)
}


def symbol(text: str) -> str:
    return f'<span class="symbol">{text}</span>'


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<p>H_0 and θ_t</p>", f"<p>{symbol('<i>H</i><sub>0</sub>')} and {symbol('<i>θ</i><sub><i>t</i></sub>')}</p>"),
        ("H̄_rest", symbol('<span class="bar"><i>H</i></span><sub>rest</sub>')),
        ("θ̂ = 1", symbol('<span class="hat"><i>θ</i></span>') + " = 1"),
        ("∇ℓ_i", symbol("∇<i>ℓ</i><sub><i>i</i></sub>")),
        ("Δ, x_test and max_length", f"{symbol('Δ')}, x_test and max_length"),
        ("<code>H_0</code> <a title='θ_t'>&lt;a_b&gt;</a>", None),
        ('<div class="arithmatex">\\[H_0\\]</div><pre>θ_t</pre>', None),
    ],
)
def test_symbols_in_the_text_are_typeset_and_nothing_in_code_is(text: str, shown: str | None) -> None:
    pytest.importorskip("mkdocs", reason="needs the documentation's tools: pip install '.[docs]'")
    from docs.hooks import on_page_content

    assert on_page_content(text).replace(symbol("<i>a</i><sub><i>b</i></sub>"), "a_b") == (shown or text)


def test_every_formula_can_be_typeset(tab: Tab) -> None:  # noqa: F811
    tab.set_content("<!doctype html>")
    tab.add_script_tag(path=DOCS / "assets" / "katex" / "katex.min.js")
    assert len(FORMULAS) > 10
    for name, formula in FORMULAS.items():
        told = tab.evaluate(
            "t => { try { katex.renderToString(t); return '' } catch (e) { return e.message } }", formula
        )
        assert told == "", name


SESSION = """$ gradmerge merge recipe.yml \\
    --set damping=1e-8 -o merged
gradient-matching: 41 tensors merged
$ echo '$HOME'   # a comment
$ not a command of its own, as it prints $ signs
 $ indented"""


@pytest.mark.parametrize(
    ("language", "text", "copied"),
    [
        (
            "console",
            SESSION,
            "gradmerge merge recipe.yml \\\n    --set damping=1e-8 -o merged\necho '$HOME'   # a comment\n"
            "not a command of its own, as it prints $ signs",
        ),
        ("console", "no prompt\nat all", "no prompt\nat all"),
        ("yaml", "$ kept", None),
    ],
)
def test_a_session_is_copied_without_prompts_and_output(tab: Tab, language: str, text: str, copied: str | None) -> None:  # noqa: F811
    tab.set_content(
        f'<div class="language-{language}"><pre id=c><button data-clipboard-target="#c > code">copy</button>'
        f"<code>{text}</code></pre></div>"
    )
    tab.add_script_tag(path=DOCS / "assets" / "site.js")
    tab.locator("button").click()
    assert tab.locator("button").get_attribute("data-clipboard-text") == copied
