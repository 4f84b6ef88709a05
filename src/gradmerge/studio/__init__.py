"""A local page to explore a merge: sliders for weights, method and options, measured with every move."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .server import check_extra, private_files, run

Jobs = Mapping[str, tuple[str | Path, Mapping[str, str]]]
"""Title → recipe and the data of its tasks."""


def serve(
    jobs: Jobs,
    *,
    port: int | None = None,
    ready: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Open recipes and serve their page to this machine, until SIGTERM or Ctrl-C.

    Args:
        jobs: Title → recipe and data (task → source); the page has a tab for each.
        port: The port; by default the first free one from 7860 on.
        ready: Called with the address once the page is served.
        options: As of :func:`gradmerge.preview`: threads, limit, batch_size, …

    >>> serve({"reviews": ("recipe.yml", {"yelp": "yelp.jsonl"})}, limit=200)  # doctest: +SKIP
    http://127.0.0.1:7860
    """
    check_extra()
    with contextlib.ExitStack() as stack:
        from .explorer import Explorer

        explorers = {title: Explorer(recipe, data, **options) for title, (recipe, data) in jobs.items()}
        for explorer in explorers.values():
            stack.callback(explorer.close)
        stack.enter_context(private_files())
        from .app import build

        page, workbenches = build(explorers)
        for workbench in workbenches:
            stack.callback(workbench.close)
        run(page, port, ready)
