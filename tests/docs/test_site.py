"""What the site does beyond its pages: formulas, symbols in the text, and copied commands."""

from __future__ import annotations

import re
from collections.abc import Callable
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


@pytest.fixture(scope="module")
def rendered() -> Callable[[str], str]:
    """Markdown as the site has it."""
    pytest.importorskip("mkdocs", reason="needs the documentation's tools: pip install '.[docs]'")
    from markdown import Markdown
    from mkdocs.config import load_config

    site = load_config(str(DOCS.parent / "mkdocs.yml"))
    return Markdown(extensions=site["markdown_extensions"], extension_configs=site["mdx_configs"]).convert


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
def test_a_session_is_copied_without_prompts_and_output(
    tab: Tab,  # noqa: F811
    rendered: Callable[[str], str],
    language: str,
    text: str,
    copied: str | None,
) -> None:
    block = rendered(f"```{language}\n{text}\n```")
    # The theme puts its button into the block when the page is shown.
    tab.set_content(block.replace("<pre>", '<pre id=c><button data-clipboard-target="#c > code">copy</button>'))
    tab.add_script_tag(path=DOCS / "assets" / "site.js")
    tab.locator("button").click()
    assert tab.locator("button").get_attribute("data-clipboard-text") == copied


def test_a_formula_of_a_page_is_found_and_typeset(tab: Tab, rendered: Callable[[str], str]) -> None:  # noqa: F811
    tab.set_content("<!doctype html>" + rendered("```math\n\\bar H = H_0 + \\sum_t H_t\n```"))
    tab.add_script_tag(path=DOCS / "assets" / "katex" / "katex.min.js")
    tab.add_script_tag(path=DOCS / "assets" / "site.js")
    tab.evaluate("document.dispatchEvent(new Event('DOMContentLoaded'))")
    assert tab.locator(".katex-display").count() == 1 and tab.locator(".katex-error").count() == 0
