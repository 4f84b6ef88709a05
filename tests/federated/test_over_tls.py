"""A server and two clients over Flower's SuperLink and TLS, with certificates made as the page makes them."""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from flwr.supercore.constant import NOOP_FEDERATION_ID, TaskType
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid
from flwr.superlink.main import create_app

import gradmerge as gm
from gradmerge.errors import InputError, MachineError
from gradmerge.federated.answerer import Answerer
from gradmerge.federated.hosting import serve
from gradmerge.federated.joining import check_server, join
from gradmerge.federated.running import refine_with_clients

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


@pytest.fixture
def superlink(certificates: Path) -> Iterator[tuple[Any, str]]:
    """Flower's SuperLink in a thread of this process, and a run's grid over HTTPS."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    app = create_app()
    files = {"ssl_certfile": str(certificates / "server.pem"), "ssl_keyfile": str(certificates / "server.key")}
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", **files))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    state = app.state.linkstate_factory.state()
    run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
    task = state.get_tasks(run_ids=[run])[0].task_id
    token = state.claim_task(task)
    state.activate_task(task)
    grid = HttpGrid(f"127.0.0.1:{port}", root_certificates=(certificates / "ca.pem").read_bytes(), token=token)
    grid.set_run(state.get_run_info(run_ids=[run])[0])
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, task
    yield grid, f"localhost:{port}"
    grid.close()
    server.should_exit = True
    thread.join(10)


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
            serve({}, port=port, insecure=True)
    with pytest.raises(InputError, match="--certificate, --key and --authority"):
        serve({}, port=port)
    with pytest.raises(InputError, match="no such file"):
        serve({}, certificate=Path("a"), key=Path("b"), authority=Path("c"))
