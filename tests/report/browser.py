"""A headless Chromium, spoken to over its debugging pipe: no driver and no package needed."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 60.0


class Browser:
    """One tab. Whatever a page complains of is kept in `complaints`."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        self.deadline = time.monotonic() + SECONDS
        self.complaints: list[str] = []
        self._seen: list[str] = []
        self._rest, self._count = b"", 0
        inbox, self._to = os.pipe()
        self._from, outbox = os.pipe()
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        # The browser reads from 3 and writes to 4; a shell puts the pipes there.
        shell = ["/bin/sh", "-c", f'exec "$0" "$@" 3</dev/fd/{inbox} 4>/dev/fd/{outbox}', PROGRAM, *options]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            shell, pass_fds=(inbox, outbox), stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
        )
        os.close(inbox)
        os.close(outbox)
        self._session: str | None = None
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command, and its answer."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self._note(answer)
        assert "error" not in answer, answer
        return dict(answer["result"])

    def open(self, path: Path, width: int = 1200, height: int = 900) -> None:
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **metrics)
        self._seen.clear()
        self.send("Page.navigate", url=path.absolute().as_uri())
        while "Page.loadEventFired" not in self._seen:
            self._note(self._next())

    def media(self, scheme: str, media: str = "") -> None:
        self.send(
            "Emulation.setEmulatedMedia", media=media, features=[{"name": "prefers-color-scheme", "value": scheme}]
        )

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        found = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def middle_of(self, element: str) -> tuple[float, float]:
        """Where the middle of an element (an expression) is on the screen, after scrolling to it."""
        box = "(e => { e.scrollIntoView({block: 'center', behavior: 'instant'}); const b = e.getBoundingClientRect();"
        x, y = self.run(f"{box} return [b.x + b.width / 2, b.y + b.height / 2]; }})({element})")
        return float(x), float(y)

    def hover(self, element: str) -> None:
        x, y = self.middle_of(element)
        self.run("new Promise(done => requestAnimationFrame(() => setTimeout(done, 50)))")
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, element: str) -> None:
        x, y = self.middle_of(element)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        codes = {"Enter": 13, "Tab": 9, "ArrowRight": 39, "Escape": 27}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=codes[key], **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=codes[key])

    def picture(self, whole: bool = False) -> bytes:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(shot["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.send("Page.printToPDF", printBackground=False)["data"])

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(10)
        os.close(self._to)
        os.close(self._from)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = self.deadline - time.monotonic()
            if left <= 0 or not select.select([self._from], [], [], left)[0]:
                raise TimeoutError("the browser did not answer in time")
            more = os.read(self._from, 1 << 20)
            if not more:
                raise RuntimeError("the browser ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        method = event.get("method", "")
        self._seen.append(method)
        details = event.get("params", {})
        wrong = method == "Runtime.exceptionThrown" or (
            method == "Runtime.consoleAPICalled" and details["type"] in ("error", "warning", "assert")
        )
        if wrong or (method == "Log.entryAdded" and details["entry"]["level"] in ("error", "warning")):
            self.complaints.append(json.dumps(details))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    opened = Browser(profile)
    try:
        yield opened
    finally:
        opened.close()
