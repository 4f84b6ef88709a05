"""What is done to the pages when MkDocs builds the site. What stands in them is there before: see `pages.py`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

from gradmerge.errors import InputError
from gradmerge.recipe.load import recipe_of_text


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A recipe that the program would refuse stops the build; what only the site can show comes out of its comment."""
    for block in re.findall(r"^```yaml[^\n]*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE):
        if re.search(r"^(merge_)?method:(?!.*\.py$)", block, re.MULTILINE):
            try:
                recipe_of_text(block.encode(), Path(), "recipe")
            except InputError as error:
                raise PluginError(f"{page.file.src_uri} shows a recipe that is not valid: {error}") from error
    return re.sub(r"^<!-- only on the site$(.*?)^-->$", r"\1", markdown, flags=re.DOTALL | re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings may say :class:`Name`; the page shows the name alone. Symbols such as θ_t are set as in formulas."""
    html = re.sub(r":(?:class|meth|func|data|attr):(?=<code>)", "", html)
    return "".join(part if is_code_or_tag else _typeset(part) for is_code_or_tag, part in _parts(html))


#: Code, formulas and tags, in which nothing is changed.
KEPT = re.compile(
    r"<(pre|code|script|style)\b.*?</\1>|<div[^>]* class=\"arithmatex\".*?</div>|<!--.*?-->|<[^>]*>", re.DOTALL
)
#: A letter with what may stand around it. One on its own is a symbol only if it is Greek.
SYMBOL = re.compile(
    r"(?<![\w&])(?:(∇²?)?([A-Za-zθαδλΔℓΣΠ∇])([\u0302-\u0304]?)_(?:{(\w{1,9})}|(rest|base|LLM|it|start|\w)(?!\w))"
    r"|([A-Za-zθ])([\u0302-\u0304])|([θαδλΔ](?![\w\u0300-\u036f])))"
)
ABOVE = {"\u0302": "hat", "\u0303": "tilde", "\u0304": "bar"}


def _parts(html: str) -> Iterator[tuple[bool, str]]:
    """The pieces of a page, and whether each is to stay as it is."""
    end = 0
    for kept in KEPT.finditer(html):
        yield False, html[end : kept.start()]
        yield True, kept[0]
        end = kept.end()
    yield False, html[end:]


def _typeset(text: str) -> str:
    def symbol(found: re.Match[str]) -> str:
        before, one, above, braced, below, two, other, alone = found.groups("")
        letter, above, below = one or two or alone, above or other, braced or below
        shown = letter if letter in "ΔΣΠ∇" else f"<i>{letter}</i>"
        shown = f'<span class="{ABOVE[above]}">{shown}</span>' if above else shown
        under = f"<i>{below}</i>" if below.isalpha() and len(below) == 1 else below
        return f'<span class="symbol">{before}{shown}{f"<sub>{under}</sub>" if under else ""}</span>'

    return SYMBOL.sub(symbol, text).replace("⋆", "<sup>⋆</sup>")
