"""A server and two clients over Flower's SuperLink and TLS, with certificates made as the page makes them."""

from __future__ import annotations

import re
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import iter_route_contexts
from flwr.supercore.constant import TASK_TOKEN_HEADER
from flwr.superlink.main import create_app

import gradmerge as gm
from gradmerge.errors import InputError, MachineError
from gradmerge.federated.answerer import Answerer
from gradmerge.federated.flower_parts import hosted
from gradmerge.federated.hosting import serve
from gradmerge.federated.joining import check_server, join
from gradmerge.federated.running import refine_with_clients
from gradmerge.federated.settings import ServerSettings

from .making import OPTIONS, client_settings, server_settings, write_place

PAGE = Path(__file__).parents[2] / "docs" / "federated.md"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the commands of the page make them."""
    folder = tmp_path_factory.mktemp("certificates")
    blocks = re.findall(r"```console\n(.*?)```", PAGE.read_text("utf-8"), re.S)
    script = next(block for block in blocks if "openssl" in block)
    commands = re.sub(r"^\$ ", "", script, flags=re.M)
    subprocess.run(["bash", "-e", "-c", commands], cwd=folder, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def superlink(certificates: Path) -> Iterator[tuple[Any, str]]:
    """Flower's SuperLink as `serve` starts it, and a run's grid."""
    files = [certificates / name for name in ("server.pem", "server.key", "ca.pem")]
    with socket.create_server(("127.0.0.1", 0)) as listening, hosted(listening, *files) as grid:
        yield grid, f"localhost:{listening.getsockname()[1]}"


def test_who_reaches_the_server_can_be_a_client_and_nothing_more(
    superlink: tuple[Any, str], certificates: Path
) -> None:
    """Flower's server has a way to start runs, whose code it runs, on the same port as that for clients."""
    address, trusted = superlink[1], ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    routes = [route.path for route in iter_route_contexts(create_app().routes)]
    assert "/v1/control/start-run" in routes and any(path.startswith("/v1/runtime/") for path in routes)
    with httpx.Client(verify=trusted, base_url=f"https://{address}") as client:
        for path in routes:
            for token in ("", "0" * 32):
                answer = client.post(path, headers={TASK_TOKEN_HEADER: token})
                assert (answer.status_code == 404) == (not path.startswith("/v1/fleet/")), path


def test_three_parties_over_tls_make_what_refine_makes(
    superlink: tuple[Any, str], certificates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grid, address = superlink
    place = write_place(tmp_path)
    one_at_a_time, answer = threading.Lock(), Answerer.answer

    def in_turn(self: Answerer, *args: Any, **more: Any) -> Any:
        with one_at_a_time:  # dual numbers are one for all threads of a process, where clients are processes
            return answer(self, *args, **more)

    monkeypatch.setattr(Answerer, "answer", in_turn)
    data = {name: place / f"{name}.jsonl" for name in ("a", "b")}
    gm.refine(place / "merged", data, out=tmp_path / "at-hand", rounds=1, progress=False, **OPTIONS)
    with ThreadPoolExecutor(2) as pool:
        root = certificates / "ca.pem"
        joined = [pool.submit(join, client_settings(place, name), address, certificates=root) for name in data]
        done = refine_with_clients(grid, server_settings(place, tmp_path / "out"))
        assert all(one.result(30) > 5 for one in joined)
    assert done["improved"] and not done["lost"]
    both = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("at-hand", "out")]
    assert both[0] == both[1]


def test_a_server_that_is_not_who_it_should_be_is_not_told_anything(
    superlink: tuple[Any, str], certificates: Path, tmp_path: Path
) -> None:
    address = superlink[1]
    with pytest.raises(InputError, match="its certificate is not trusted"):
        check_server(address, None, False, 0.1)
    with pytest.raises(InputError, match="by a name that its certificate holds"):
        check_server(address.replace("localhost", socket.gethostname()), certificates / "ca.pem", False, 0.1)
    (tmp_path / "text.pem").write_text("no certificate")
    for path in (tmp_path / "text.pem", tmp_path / "missing.pem"):
        with pytest.raises(InputError, match="cannot be read as a certificate"):
            check_server(address, path, False, 0.1)


def test_no_server_no_tls_or_no_address_is_said(certificates: Path) -> None:
    settings = ServerSettings(model="m", out="o")
    for address in ("localhost", "localhost:port", "localhost:99999"):
        with pytest.raises(InputError, match="HOST:PORT"):
            check_server(address, None, True, 0.1)
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
        with pytest.raises(MachineError, match="no server answers there"):
            check_server(f"127.0.0.1:{port}", None, True, 0.1)
        one.listen()
        answering = threading.Thread(target=lambda: one.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"))
        answering.start()
        with pytest.raises(InputError, match="does not speak TLS"):
            check_server(f"127.0.0.1:{port}", certificates / "ca.pem", False, 0.1)
        answering.join()
        with pytest.raises(InputError, match=r"cannot listen there.*another --port"):
            serve(settings, port=port, insecure=True)
    with pytest.raises(InputError, match="--certificate, --key and --authority"):
        serve(settings, port=port)
    with pytest.raises(InputError, match="no such file"):
        serve(settings, certificate=Path("a"), key=Path("b"), authority=Path("c"))
    authority = certificates / "ca.pem"
    with pytest.raises(InputError, match="not a certificate and its private key"):
        serve(settings, port=0, certificate=authority, key=certificates / "server.key", authority=authority)
