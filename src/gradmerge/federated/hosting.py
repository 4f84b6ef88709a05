"""`gradmerge federated serve`: Flower's SuperLink and a run of our server app, in one command.

Both are Flower's own programs, with their files in a folder of their own that is gone afterwards. What the app tells
comes by a file, line by line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import GradmergeError, InputError, MachineError
from ..text import first_line
from .wire import need_flower

#: Seconds for Flower's programs to start, and between two looks.
PATIENCE, PAUSE = 120.0, 0.2
PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "gradmerge-federated"
version = "{version}"
description = "Refinement across organisations, by gradmerge"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "gradmerge"
flwr-version-target = "{flower}"

[tool.flwr.app.components]
serverapp = "gradmerge.federated.server_app:app"
clientapp = "gradmerge.federated.client_app:app"

[tool.flwr.app.config]
{config}
"""


def write_app(folder: Path, config: Mapping[str, Any]) -> None:
    """A Flower app that names our two: what `flwr run` takes."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [f"{name.replace('_', '-')} = {json.dumps(value)}" for name, value in config.items()]
    told = PROJECT.format(version=__version__.partition("+")[0], flower=version("flwr"), config="\n".join(lines))
    (folder / "pyproject.toml").write_text(told, "utf-8")


def serve(
    config: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    insecure: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Start a SuperLink, refine with the clients that come, and stop it again; what the server app reports.

    Args:
        config: The refinement, as :class:`~.settings.ServerSettings` takes it.
        host: The address to listen at; 0.0.0.0 for all.
        port: The port to listen at.
        certificate: The server's certificate. It must hold 127.0.0.1 too: so the app here reaches the SuperLink.
        key: Its private key.
        authority: The certificate of who signed it.
        insecure: Without TLS.
        say: Told what happens.
    """
    need_flower()
    tls = {"--ssl-certfile": certificate, "--ssl-keyfile": key, "--ssl-ca-certfile": authority}
    if insecure == any(tls.values()) or (not insecure and not all(tls.values())):
        raise InputError("give --certificate, --key and --authority, which are for TLS, or --insecure")
    for path in tls.values():
        if path is not None and not path.is_file():
            raise InputError(f"{path}: no such file ({path.absolute()})")
    _check_free(host, port)
    with tempfile.TemporaryDirectory(prefix="gradmerge-federated-") as place:
        folder = Path(place)
        told, log = folder / "told.jsonl", folder / "flower.log"
        write_app(folder / "app", config)
        here = f"127.0.0.1:{port}" if host in ("0.0.0.0", "127.0.0.1", "localhost") else f"{host}:{port}"
        trust = "insecure = true" if insecure else f"root-certificates = {json.dumps(str(authority.absolute()))}"  # type: ignore[union-attr]
        (folder / "home").mkdir()
        (folder / "home" / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{here}"\n{trust}\n', "utf-8"
        )
        names = {"FLWR_HOME": str(folder / "home"), "GRADMERGE_FEDERATED_TOLD": str(told)}
        quiet = {"FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_TELEMETRY_ENABLED": "0"}
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        environment = {**quiet, **os.environ, **names, "PATH": beside, "PYTHONPATH": _import_path()}
        files = (
            ["--insecure"]
            if insecure
            else [str(w) for pair in tls.items() for w in (pair[0], Path(str(pair[1])).absolute())]
        )
        command = [_program("flower-superlink"), "--host", host, "--port", str(port), *files]
        command.append("--disable-runtime-dependency-installation")
        with log.open("wb") as out, _running(command, environment, out) as link:
            _wait_for(link, here, log)
            say(f"listening at {host}:{port}{' without TLS' if insecure else ''}")
            run = subprocess.run(
                [_program("flwr"), "run", str(folder / "app"), "here"], env=environment, capture_output=True, text=True
            )
            if run.returncode:
                raise MachineError(f"Flower did not start the run:\n{(run.stdout + run.stderr)[-2000:].strip()}")
            for line in _lines(told, link):
                if "say" in line:
                    say(str(line["say"]))
                elif "error" in line:
                    raise _failure(str(line["error"]), line.get("status"))
                else:
                    time.sleep(1.0)  # for the clients to fetch that it has ended
                    done: dict[str, Any] = line["done"]
                    return done
        raise MachineError(f"Flower's SuperLink ended before the refinement did:\n{_end_of(log)}")


def _failure(text: str, status: Any) -> GradmergeError:
    return InputError(text) if status == InputError.status else MachineError(text)


def _check_free(host: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind((host, port))
    except (OSError, OverflowError) as error:
        raise InputError(f"{host}:{port}: cannot listen there: {first_line(error)}. Give another --port.") from error


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise InputError(f"{name}: Flower's program is not there: pip install 'gradmerge[federated]'")
    return found


def _import_path() -> str:
    """So that the app finds the gradmerge that runs here."""
    return os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)


@contextlib.contextmanager
def _running(command: list[str], environment: Mapping[str, str], out: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all that it starts, which ends with the block."""
    process = subprocess.Popen(
        command, env=dict(environment), stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    host, _, port = address.rpartition(":")
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if process.poll() is not None:
            raise MachineError(f"Flower's SuperLink did not start:\n{_end_of(log)}")
        with contextlib.suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=5):
            return
        time.sleep(PAUSE)
    raise MachineError(f"Flower's SuperLink did not start within {PATIENCE:g} s:\n{_end_of(log)}")


def _lines(path: Path, process: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    """The lines of a file as they are written, until the process ends."""
    read = 0
    while process.poll() is None:
        content = path.read_bytes() if path.is_file() else b""
        whole = content.rfind(b"\n") + 1
        for line in content[read:whole].splitlines():
            yield json.loads(line)
        read = max(read, whole)
        time.sleep(PAUSE)


def _end_of(log: Path) -> str:
    return log.read_text("utf-8", errors="replace")[-2000:].strip()
