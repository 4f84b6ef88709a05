"""The server of the page: one address, nothing asked of other hosts, nothing left behind.

Gradio is mounted in an application of our own: the port is taken before any model is read, requests that come from
other web pages are refused, and signals end it in order.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import InputError

if TYPE_CHECKING:
    from gradio import Blocks
    from starlette.types import ASGIApp, Receive, Scope, Send

LOCAL = "127.0.0.1"
#: Where a port is looked for when none is named.
PORTS = range(7860, 7960)
#: Seconds that open pages have to let go once the server ends.
FAREWELL = 1


def check_extra() -> None:
    """Say so if Gradio is not installed; importing it for that would take seconds."""
    if importlib.util.find_spec("gradio") is None:
        raise InputError("studio needs Gradio, which is not installed: pip install 'gradmerge[studio]'")


def listen(host: str = LOCAL, port: int | None = None) -> socket.socket:
    """The socket of the page; without a port, the first free one from 7860 on."""
    if port is not None and not 0 <= port <= 65535:
        raise InputError(f"--port {port}: between 0 and 65535; 0 is any that is free")
    bare = host.strip("[]")
    family = socket.AF_INET6 if ":" in bare else socket.AF_INET
    for candidate in PORTS if port is None else (port,):
        try:
            return socket.create_server((bare, candidate), family=family)
        except OSError as error:
            if error.errno == errno.EADDRINUSE and port is None:
                continue
            if error.errno == errno.EADDRINUSE:
                raise InputError(
                    f"--port {port}: something else answers there. Leave --port out to have a free one chosen"
                ) from error
            place = f"--host {host}" if isinstance(error, socket.gaierror) or port is None else f"{host}:{candidate}"
            raise InputError(f"{place}: no page can be served there: {error.strerror or error}") from error
    raise InputError(f"ports {PORTS[0]} to {PORTS[-1]} are all in use; name another one with --port")


def address(listening: socket.socket, host: str) -> str:
    """What to type into a browser."""
    bare = host.strip("[]")
    bare = LOCAL if bare in ("0.0.0.0", "") else "::1" if bare == "::" else bare
    return f"http://{f'[{bare}]' if ':' in bare else bare}:{listening.getsockname()[1]}"


def is_local(host: str) -> bool:
    """Whether only this machine can reach the address."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare == "localhost"


class SamePage:
    """Refuses what other web pages ask: the page writes to the disk for whoever it serves.

    A browser says in ``Origin`` which page asks. The name in ``Host`` is checked too where only this machine is served,
    as a foreign name may be made to lead here.
    """

    def __init__(self, app: ASGIApp, local: bool) -> None:
        self._app, self._local = app, local

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
            asked, origin = headers.get("host", ""), headers.get("origin")
            foreign = self._local and not is_local(urlsplit(f"//{asked}").hostname or "")
            if foreign or (origin is not None and urlsplit(origin).netloc != asked):
                from starlette.responses import PlainTextResponse

                await PlainTextResponse("This page answers only itself.\n", 403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """What Gradio writes goes into a folder that is removed at the end; it tells nobody that it runs."""
    with tempfile.TemporaryDirectory(prefix="gradmerge-studio-") as folder:
        told = {
            "GRADIO_TEMP_DIR": folder,
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_RUN_HISTORY": "False",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        before = {name: os.environ.get(name) for name in told}
        os.environ.update(told)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def run(
    blocks: Blocks,
    listening: socket.socket,
    host: str,
    ready: Callable[[str], None],
    guarded: bool,
    scripts: Mapping[str, str],
    **look: Any,
) -> None:
    """Serve the page until SIGTERM or Ctrl-C; ``ready`` is told the address, ``look`` goes to Gradio."""
    import fastapi
    import gradio
    import uvicorn

    class Announced(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready(address(listening, host))  # from here on signals end the server

    app = fastapi.FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    for path, text in scripts.items():
        answer = fastapi.Response(text, media_type="text/javascript", headers={"Cache-Control": "no-cache"})
        app.get(path)(lambda answer=answer: answer)
    if guarded:
        app.add_middleware(SamePage, local=is_local(host))
    port = listening.getsockname()[1]
    gradio.mount_gradio_app(
        app, blocks, "/", host, port, footer_links=[], ssr_mode=False, mcp_server=False, enable_monitoring=False, **look
    )
    # Silent: what there is to say is said in the page, and pages that are cut off at the end are no error.
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=FAREWELL, access_log=False)
    with _ends_in_order():
        Announced(config).run(sockets=[listening])


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """uvicorn raises the signal that ended it once more: by then all is done, and the command has succeeded."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
