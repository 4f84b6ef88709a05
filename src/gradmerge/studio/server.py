"""Serve the page with Gradio: on this machine only, without telemetry, and with a clean stop on SIGTERM."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import InputError
from ..report.theme import DARK, LIGHT

if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.types import ASGIApp, Receive, Scope, Send

HOST = "127.0.0.1"
#: Seconds that open pages have to disconnect when the server stops.
SHUTDOWN_SECONDS = 1


def check_extra() -> None:
    """Raise InputError if Gradio is not installed, without the seconds that importing it takes."""
    if importlib.util.find_spec("gradio") is None:
        raise InputError("studio needs Gradio, which is not installed: pip install 'gradmerge[studio]'")


def check_port(port: int | None) -> int | None:
    """Return a free port for 0, or the port if it is free. With None Gradio chooses one, from 7860 on."""
    if port is None:
        return None
    try:
        with socket.create_server((HOST, port)) as listening:
            return int(listening.getsockname()[1])
    except (OSError, OverflowError) as error:
        raise InputError(f"port {port}: cannot be opened: {error}. Leave it out to use a free one") from error


class SameOrigin:
    """Refuses requests from other web pages, because the page writes to the disk.

    Browsers send the page that asks in ``Origin``. ``Host`` is checked too, because a foreign name may resolve to this
    machine.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get("host", ""), headers.get("origin")
            local = urlsplit(f"//{host}").hostname in (HOST, "localhost")
            if not local or (origin is not None and urlsplit(origin).netloc != host):
                from starlette.responses import PlainTextResponse

                await PlainTextResponse("This page answers only itself.\n", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Give Gradio a temporary folder, and turn off its telemetry. Enter it before Gradio is imported."""
    with tempfile.TemporaryDirectory(prefix="gradmerge-studio-") as folder:
        os.environ |= {
            "GRADIO_TEMP_DIR": folder,
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_RUN_HISTORY": "False",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        yield


def run(blocks: Blocks, port: int | None, ready: Callable[[str], None]) -> None:
    """Serve the page until SIGTERM or Ctrl-C; ``ready`` gets its address."""
    import gradio as gr
    from starlette.middleware import Middleware

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # pages that are cut off at the end are no error
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        _, address, _ = blocks.launch(
            server_name=HOST,
            server_port=port,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            inbrowser=False,
            footer_links=[],
            run_history=False,
            ssr_mode=False,
            mcp_server=False,
            enable_monitoring=False,
            theme=gr.themes.Base(
                font=["system-ui", "sans-serif"], font_mono=["monospace"], radius_size=gr.themes.sizes.radius_md
            ),
            css=_style(),
            head=f"<script>{_read('studio.js')}</script>",
            app_kwargs={
                "docs_url": None,
                "redoc_url": None,
                "openapi_url": None,
                "middleware": [Middleware(SameOrigin)],
            },
        )
        blocks.server.config.timeout_graceful_shutdown = SHUTDOWN_SECONDS
        ready(address.rstrip("/"))
        stopped.wait()
    finally:
        blocks.close(verbose=False)


def _style() -> str:
    colors = (":root", LIGHT), ("body.dark", DARK)
    variables = [where + "{" + "".join(f"--gm-{n}:{v};" for n, v in one.items()) + "}" for where, one in colors]
    return "".join(variables) + _read("studio.css")


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
