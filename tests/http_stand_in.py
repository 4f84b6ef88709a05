"""A web server on this machine for files: with ranges, or without, and with the ways in which servers fail."""

from __future__ import annotations

import base64
import contextlib
import re
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit


class Web:
    """Files by their paths, what they are protected with, and what was given out."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.user = ""
        """`name:password` that every request must carry."""
        self.status = 0
        """What every request is answered with, if not 0."""
        self.failures = 0
        """Requests for ranges that fail before one succeeds."""
        self.ranges = True
        self.given: Counter[str] = Counter()
        self.requests = 0
        self.address = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    web: Web

    def log_message(self, *_: Any) -> None:
        return

    def _answer(self, status: int, content: bytes = b"", name: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hash(self.web.files.get(name))}"')
        self.end_headers()
        if self.command == "GET":
            self.web.given[name] += len(content)
            with contextlib.suppress(OSError):  # whoever asked has seen enough
                self.wfile.write(content)

    def _handle(self) -> None:
        web, name = self.web, unquote(urlsplit(self.path).path)[1:]
        web.requests += 1
        right = "Basic " + base64.b64encode(web.user.encode()).decode()
        found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if web.status:
            return self._answer(web.status)
        if web.user and self.headers.get("Authorization") != right:
            return self._answer(401)
        if name not in web.files:
            return self._answer(404)
        if found and web.failures:
            web.failures -= 1
            return self._answer(503)
        content = web.files[name]
        if found and web.ranges:
            return self._answer(206, content[int(found[1]) : int(found[2]) + 1], name)
        return self._answer(200, content, name)

    do_GET = do_HEAD = _handle


class _Server(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that goes away is no failure here
            traceback.print_exc()


@contextlib.contextmanager
def serving(handler: type[BaseHTTPRequestHandler], **shared: Any) -> Iterator[str]:
    """The address of a server on a port of its own, until the block ends; its handlers have ``shared`` in common."""
    # A head and its body are two writes, and the second would wait until the first is acknowledged: 40 ms a request.
    shared["disable_nagle_algorithm"] = True
    server = _Server(("127.0.0.1", 0), type("Handler", (handler,), shared))
    thread = threading.Thread(target=server.serve_forever, daemon=True, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def web_server() -> Iterator[Web]:
    """A web server for files, until the block ends."""
    web = Web()
    with serving(_Handler, web=web) as web.address:
        yield web
