"""Serve the page with Gradio: on this machine only, without telemetry, and with a clean stop on SIGTERM."""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import logging
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ..errors import InputError

if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL = "127.0.0.1"
#: The ports that are tried if none is given.
PORTS = range(7860, 7960)
#: Seconds that open pages have to disconnect when the server stops.
SHUTDOWN_SECONDS = 1


def check_extra() -> None:
    """Raise InputError if Gradio is not installed, without the seconds that importing it takes."""
    if importlib.util.find_spec("gradio") is None:
        raise InputError("studio needs Gradio, which is not installed: pip install 'gradmerge[studio]'")


def find_port(host: str = LOCAL, port: int | None = None) -> int:
    """The port, if it is free; without one, the first free port from 7860 on."""
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"port {port}: must be between 0 and 65535; 0 is any free port")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    for candidate in PORTS if port is None else (port,):
        try:
            with socket.create_server((bare, candidate), family=family) as listening:
                return int(listening.getsockname()[1])
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise InputError(f"port {port}: is in use. Leave it out to use a free one") from error
            raise InputError(f"host {host}: port {candidate} cannot be opened: {error.strerror or error}") from error
    raise InputError(f"port: {PORTS[0]} to {PORTS[-1]} are all in use; give another one")


def address(host: str, port: int) -> str:
    """The address for a browser."""
    bare = host.strip("[]")
    bare = LOCAL if bare in ("0.0.0.0", "") else "::1" if bare == "::" else bare
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{port}"


def is_local(host: str) -> bool:
    """Whether only this machine can reach an address."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


class SameOrigin:
    """Refuses requests from other web pages, because the page writes to the disk.

    Browsers send the page that asks in ``Origin``. ``Host`` is checked too if only this machine is served, because a
    foreign name may resolve to this machine.
    """

    def __init__(self, app: ASGIApp, local: bool) -> None:
        self._app, self._local = app, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            host, origin = headers.get("host", ""), headers.get("origin")
            foreign = self._local and not is_local(urlsplit(f"//{host}").hostname or "")
            if foreign or (origin is not None and urlsplit(origin).netloc != host):
                from starlette.responses import PlainTextResponse

                await PlainTextResponse("This page answers only itself.\n", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Give Gradio a temporary folder, and turn off its telemetry. Enter it before Gradio is imported."""
    with tempfile.TemporaryDirectory(prefix="gradmerge-studio-") as folder:
        variables = {
            "GRADIO_TEMP_DIR": folder,
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_RUN_HISTORY": "False",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def run(blocks: Blocks, host: str, port: int, ready: Callable[[str], None], same_origin: bool) -> None:
    """Serve the page until SIGTERM or Ctrl-C; ``ready`` gets its address."""
    from starlette.middleware import Middleware
    from starlette.responses import Response
    from starlette.routing import Route

    from . import theme

    async def script(request: object) -> Response:
        return Response(theme.script(), media_type="text/javascript", headers={"Cache-Control": "no-cache"})

    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # pages that are cut off at the end are no error
    with _stop_signal() as stopped:
        blocks.launch(
            server_name=host,
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
            theme=theme.theme(),
            css=theme.style(),
            head=theme.head(),
            app_kwargs={
                "docs_url": None,
                "redoc_url": None,
                "openapi_url": None,
                "routes": [Route(theme.SCRIPT, script)],
                "middleware": [Middleware(SameOrigin, local=is_local(host))] if same_origin else [],
            },
        )
        blocks.server.config.timeout_graceful_shutdown = SHUTDOWN_SECONDS
        try:
            ready(address(host, port))
            stopped.wait()
        finally:
            blocks.close(verbose=False)


@contextlib.contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event that SIGTERM and Ctrl-C set."""
    stopped = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
