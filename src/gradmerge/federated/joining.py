"""`gradmerge federated join`: a client that runs our app and nothing else.

Flower's own SuperNode runs whatever code the server's run brings (a Flower App Bundle). Here the same connection of
Flower's carries the same messages to the app that is installed, and the bundle is never fetched. The process stays, so
that the model is loaded once.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import InputError, MachineError
from ..text import first_line
from .answerer import Answerer
from .settings import ClientSettings
from .wire import need_flower

#: Seconds between two looks for a question.
PAUSE = 0.2
#: Bytes of a question at most, as a multiple of the model's: its weights, and up to 16 directions.
MOST_COPIES = 20
#: Flower's number of an app's own failure.
UNKNOWN_KIND = 2


def join(
    settings: ClientSettings,
    superlink: str,
    *,
    certificates: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    wait: float = 600.0,
    say: Callable[[str], None] = lambda text: None,
) -> int:
    """Answer a server's questions until it says that there are no more; how many were answered.

    Args:
        settings: The model, the data, and what may be told of them.
        superlink: HOST:PORT of Flower's SuperLink.
        certificates: The authority that the server's certificate is of; None for those that the system trusts.
        key: The client's private key, where the SuperLink knows its clients by their keys.
        insecure: Without TLS.
        wait: Seconds to try to reach the server for.
        say: Told what is asked.
    """
    need_flower()
    with Answerer(settings, say) as answerer:
        check_server(superlink, certificates, insecure, wait)
        return _serve(answerer, superlink, certificates, key, insecure, wait, say)


def check_server(superlink: str, certificates: Path | None, insecure: bool, wait: float) -> None:
    """Whether the server is there and is who its certificate says: Flower would try again for ever."""
    host, colon, port = superlink.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise InputError(f"{superlink}: give the server as HOST:PORT, such as localhost:8000")
    context = None
    if not insecure:
        try:
            context = ssl.create_default_context(cafile=str(certificates) if certificates is not None else None)
        except (OSError, ssl.SSLError) as error:
            raise InputError(f"{certificates}: cannot be read as a certificate: {first_line(error)}") from error
    end = time.monotonic() + wait
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as plain:
                if context is not None:
                    with context.wrap_socket(plain, server_hostname=host.strip("[]")):
                        pass
                return
        except ssl.SSLCertVerificationError as error:
            raise InputError(
                f"{superlink}: its certificate is not trusted: {error.verify_message}. Give the authority that signed "
                "it with --root-certificates, and the server by a name that its certificate holds."
            ) from error
        except ssl.SSLError as error:
            raise InputError(f"{superlink}: does not speak TLS ({error.reason}); is --insecure meant?") from error
        except OSError as error:
            if time.monotonic() > end:
                raise MachineError(f"{superlink}: no server answers there: {error.strerror or error}") from error
        time.sleep(PAUSE)


def _serve(
    answerer: Answerer,
    superlink: str,
    certificates: Path | None,
    key: Path | None,
    insecure: bool,
    wait: float,
    say: Callable[[str], None],
) -> int:
    from flwr.app import Context, Error, Message, RecordDict

    try:
        from flwr.supercore.inflatable.inflatable_object import (
            get_all_nested_objects,
            get_object_tree,
            no_object_id_recompute,
        )
        from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree
        from flwr.supernode.fleet_http_connection import http_request_response
    except ImportError as error:
        raise InputError(
            f"this version of Flower is laid out otherwise ({first_line(error)}): pip install 'gradmerge[federated]' "
            "brings one that fits, or run the client app by flower-supernode"
        ) from error
    from .client_app import make_app

    app = make_app(lambda context: answerer)
    roots = certificates.read_bytes() if certificates is not None else None
    contexts: dict[int, Any] = {}
    answered, most = 0, answerer.nbytes * MOST_COPIES + 10_000_000
    try:
        with http_request_response(superlink, insecure, roots, _keys(key), 5, wait) as connection:
            node, receive, send, _, _, pull, push, confirm = connection
            say(f"joined {superlink} as {answerer.settings.name}")
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
                context = contexts.setdefault(run, Context(run, node, {}, RecordDict(), {}))
                begun = time.monotonic()
                try:
                    reply = app(message, context)
                except ValueError:  # of a kind that the app does not have
                    reply = Message(Error(UNKNOWN_KIND, "it does not answer that kind of question"), reply_to=message)
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


def _keys(path: Path | None) -> Any:
    """The client's key pair, from a private key as `ssh-keygen -t ecdsa -b 384` writes it."""
    if path is None:
        return None
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    try:
        private = load_ssh_private_key(path.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise InputError(f"{path}: cannot be read as a private key: {first_line(error)}") from error
    if not isinstance(private, ec.EllipticCurvePrivateKey):
        raise InputError(f"{path}: is not an elliptic curve key, as `ssh-keygen -t ecdsa -b 384` makes")
    return private, private.public_key()
