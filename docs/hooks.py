"""What is done to the pages when MkDocs builds the site. What stands in them is there before: see `pages.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

from gradmerge.errors import InputError
from gradmerge.recipe.documents import of_documents
from gradmerge.safe_yaml import parse_documents


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """A recipe that the program would refuse stops the build; what only the site can show comes out of its comment."""
    for block in re.findall(r"^```yaml[^\n]*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE):
        if re.search(r"^(merge_)?method:", block, re.MULTILINE):
            try:
                of_documents(parse_documents(block, "recipe"), Path(), "recipe")
            except InputError as error:
                raise PluginError(f"{page.file.src_uri} shows a recipe that is not valid: {error}") from error
    return re.sub(r"^<!-- only on the site$(.*?)^-->$", r"\1", markdown, flags=re.DOTALL | re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings may say :class:`Name`; the page shows the name alone."""
    return re.sub(r":(?:class|meth|func|data|attr):(?=<code>)", "", html)
