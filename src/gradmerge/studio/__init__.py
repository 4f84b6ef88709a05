"""A local page to explore a merge: sliders for weights, method and options, and what is measured with every move.

What is shown comes from :func:`gradmerge.explore`; here it is laid out with Gradio. Rooms below know nothing of it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradmerge as gm

from .server import LOCAL, check_extra, listen, private_files, run

Jobs = Mapping[str, tuple[str | Path, Mapping[str, str]]]
"""Title → recipe and the data of its tasks."""


def serve(
    jobs: Jobs,
    listening: socket.socket | None = None,
    *,
    host: str = LOCAL,
    port: int | None = None,
    read_only: bool = False,
    ready: Callable[[str], None] = print,
    **options: Any,
) -> None:
    """Open the recipes and serve their page until SIGTERM or Ctrl-C.

    Args:
        jobs: Title → recipe and data (task → source); with several the page has a tab for each.
        listening: A socket of :func:`gradmerge.studio.server.listen`; by default one at ``host`` and ``port``.
        host, port: Where to serve; by default for this machine only, at the first free port from 7860 on.
        read_only: The page writes nothing to the disk.
        ready: Told the address once the page is there.
        options: As of :func:`gradmerge.explore`: threads, limit, batch_size, …

    >>> serve({"reviews": ("recipe.yml", {"yelp": "yelp.jsonl"})}, limit=200)  # doctest: +SKIP
    http://127.0.0.1:7860
    """
    check_extra()
    with contextlib.ExitStack() as open_until_end:
        listening = listening or open_until_end.enter_context(listen(host, port))
        opened = {
            title: open_until_end.enter_context(gm.explore(recipe, data or None, **options))
            for title, (recipe, data) in jobs.items()
        }
        open_until_end.enter_context(private_files())
        # Gradio, which these import, is told where to write before.
        from . import theme as look
        from .app import build
        from .session import Workbench

        benches = {title: Workbench(explorer) for title, explorer in opened.items()}
        for bench in benches.values():
            open_until_end.callback(bench.close)
        scripts = {look.SCRIPT: look.script()}
        shown = {"theme": look.theme(), "css": look.style(), "head": look.head()}
        run(build(benches, read_only), listening, host, ready, not read_only, scripts, **shown)
