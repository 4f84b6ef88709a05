"""What we use of Flower beyond its public interface: its server inside ours, and its connection inside a client.

Flower's own programs run code that comes over the network: a SuperLink any run's server app, for whoever reaches its
port, and a SuperNode any run's client app. Here the same server and connection carry the same messages, and nothing
that arrives is run. The names below are those of Flower 1.41.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, MachineError
from ..text import first_line

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.serverapp import Grid

#: Seconds between two looks for a question, for Flower's server to start, and between two signs that a run is alive.
PAUSE, PATIENCE, BEAT = 0.2, 60.0, 10.0
#: What clients call; all else of the server is for who holds the run's token, which is us.
FOR_CLIENTS = "/v1/fleet/"
#: Flower's number of an app's own failure.
FAILED = 2


def need_flower() -> None:
    """Say what to install where Flower is not."""
    try:
        import flwr  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"Flower is needed to refine with others, and is not there ({first_line(error)}): "
            "pip install 'gradmerge[federated]'"
        ) from error


@contextlib.contextmanager
def _laid_out_as_known() -> Iterator[None]:
    try:
        yield
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"Flower {version('flwr')} is laid out otherwise than 1.41 ({first_line(error)}): "
            "pip install 'gradmerge[federated]' brings one that fits, or use Flower's own programs"
        ) from error


@contextlib.contextmanager
def hosted(
    listening: socket.socket, certificate: Path | None, key: Path | None, authority: Path | None
) -> Iterator[Grid]:
    """Flower's SuperLink in a thread of this process, and a run of it; without a certificate, without TLS."""
    with _laid_out_as_known():
        import uvicorn
        from flwr.supercore.constant import NOOP_FEDERATION_ID, TASK_TOKEN_HEADER, TaskType
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid
        from flwr.superlink.main import create_app

        logging.getLogger("flwr").setLevel(logging.WARNING)
        app = create_app()
        state = app.state.linkstate_factory.state()
        run = state.create_run(None, None, None, {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP)
        task = state.get_tasks(run_ids=[run])[0].task_id
        token = state.claim_task(task)
        state.activate_task(task)
    guarded = _for_clients_only(app, TASK_TOKEN_HEADER.lower().encode(), token.encode())
    files = {"ssl_certfile": certificate, "ssl_keyfile": key} if certificate is not None else {}
    try:
        config: Any = uvicorn.Config(guarded, log_level="warning", lifespan="off", ws="none", **files)  # type: ignore[arg-type]
        config.load()
    except OSError as error:  # ssl.SSLError is one
        raise InputError(f"{certificate}, {key}: not a certificate and its private key: {first_line(error)}") from error
    server, over = uvicorn.Server(config), threading.Event()

    def beat() -> None:
        while not over.wait(BEAT):
            state.acknowledge_task_heartbeat(task)

    threads = [threading.Thread(target=server.run, args=([listening],), daemon=True)]
    threads.append(threading.Thread(target=beat, daemon=True))
    for thread in threads:
        thread.start()
    end = time.monotonic() + PATIENCE
    while not server.started:
        if not threads[0].is_alive() or time.monotonic() > end:
            raise MachineError("Flower's SuperLink did not start; its words are above")
        time.sleep(0.02)
    host, port = listening.getsockname()[:2]
    here = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    roots = authority.read_bytes() if authority is not None else None
    address = f"[{here}]:{port}" if ":" in here else f"{here}:{port}"
    grid = HttpGrid(address, insecure=certificate is None, root_certificates=roots, token=token)
    grid.set_run(state.get_run_info(run_ids=[run])[0])
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, task
    try:
        yield grid
    finally:
        grid.close()
        over.set()
        server.should_exit = True
        for thread in threads:
            thread.join(10)


def _for_clients_only(app: Any, header: bytes, token: bytes) -> Any:
    """Flower's server without what starts runs, and so has code of others run here."""
    from starlette.responses import Response

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        ours = hmac.compare_digest(dict(scope["headers"]).get(header, b""), token)
        passed = app if ours or scope["path"].startswith(FOR_CLIENTS) else Response(status_code=404)
        await passed(scope, receive, send)

    return answer


def answer_until_the_end(
    superlink: str,
    answer: Callable[[Message, Context], Message],
    *,
    most: int,
    certificates: Path | None,
    keys: Any,
    insecure: bool,
    wait: float,
    joined: Callable[[], None],
) -> int:
    """Answer a server's messages, of at most so many bytes each, until it says that there are no more; how many."""
    from flwr.app import Context, Error, Message, RecordDict

    with _laid_out_as_known():
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
        from flwr.supernode.fleet_http_connection import http_request_response
    roots = certificates.read_bytes() if certificates is not None else None
    remembered, answered = RecordDict(), 0  # over all runs: a server can start as many as it likes
    try:
        with http_request_response(superlink, insecure, roots, keys, 5, wait) as connection:
            node, receive, send, _, _, pull, push, confirm = connection
            joined()
            while True:
                received = receive()
                if received is None:
                    time.sleep(PAUSE)
                    continue
                head, tree = received
                run, taken = head.metadata.run_id, 0

                def fetch(name: str, run: int = run) -> bytes:
                    nonlocal taken
                    content = pull(run, name)
                    taken += len(content)
                    if taken > most:
                        raise MachineError(
                            f"{superlink}: sends more than a model of this size needs; it is not answered"
                        )
                    return content

                message = pull_and_inflate_object_from_tree(tree, fetch, partial(confirm, run), return_type=Message)
                message.metadata.__dict__["_message_id"] = tree.object_id
                begun = time.monotonic()
                try:
                    reply = answer(message, Context(run, node, {}, remembered, {}))
                except ValueError:  # of a kind that the app does not have
                    reply = Message(Error(FAILED, "it does not answer that kind of question"), reply_to=message)
                reply.metadata.__dict__["_message_id"] = reply.object_id
                with no_object_id_recompute():
                    objects = get_all_nested_objects(reply)
                    wanted, session = send(reply, get_object_tree(reply), time.monotonic() - begun)
                    for name in wanted:
                        push(run, session, name, objects[name].deflate())
                answered += 1
                if message.metadata.message_type == "query.end":
                    return answered
    except SystemExit as error:  # how Flower says that it could not connect
        raise MachineError(f"{superlink}: the server does not take this client; Flower's words are above") from error
    raise MachineError(f"{superlink}: the connection was lost; Flower's words are above")
