"""`gradmerge federated serve`: a refinement with whoever joins, and the app for those who run Flower's own programs."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..errors import InputError
from ..text import first_line
from .flower_parts import hosted, need_flower
from .running import refine_with_clients
from .settings import ServerSettings

#: Seconds for the clients to leave when it is over.
LEAVING = 5.0
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
    settings: ServerSettings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    certificate: Path | None = None,
    key: Path | None = None,
    authority: Path | None = None,
    insecure: bool = False,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Listen, refine with the clients that come, and stop; what was done, as a record says it.

    Args:
        settings: The refinement.
        host: The address to listen at; 0.0.0.0 for all.
        port: The port to listen at; 0 for any that is free.
        certificate: The server's certificate. It must hold 127.0.0.1 too, or ``host``: so we reach it ourselves.
        key: Its private key.
        authority: The certificate of who signed it.
        insecure: Without TLS.
        say: Told what happens.
    """
    need_flower()
    files = (certificate, key, authority)
    if insecure == any(files) or (not insecure and not all(files)):
        raise InputError("give --certificate, --key and --authority, which are for TLS, or --insecure")
    for path in files:
        if path is not None and not path.is_file():
            raise InputError(f"{path}: no such file ({path.absolute()})")
    with _listening(host, port) as listening, hosted(listening, *files) as grid:
        say(f"listening at {host}:{listening.getsockname()[1]}{' without TLS' if insecure else ''}")
        done = refine_with_clients(grid, settings, say)
        end = time.monotonic() + LEAVING
        while list(grid.get_node_ids()) and time.monotonic() < end:
            time.sleep(0.1)
    return done


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        raise InputError(f"{host}:{port}: cannot listen there: {first_line(error)}. Give another --port.") from error
