"""`gradmerge federated join`: a client that runs our app and nothing else, in one process: the model is loaded once."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..errors import InputError, MachineError
from ..text import first_line
from .answerer import Answerer
from .flower_parts import PAUSE, answer_until_the_end, need_flower
from .settings import ClientSettings

#: Bytes of a question at most, as a multiple of the model's: its weights, and up to 16 directions.
MOST_COPIES = 20


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
        from .client_app import make_app

        return answer_until_the_end(
            superlink,
            make_app(lambda context: answerer),
            most=answerer.nbytes * MOST_COPIES + 10_000_000,
            certificates=certificates,
            keys=_keys(key),
            insecure=insecure,
            wait=wait,
            joined=lambda: say(f"joined {superlink} as {settings.name}"),
        )


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
