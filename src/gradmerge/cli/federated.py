"""`gradmerge federated serve`, `join` and `app`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .help import Commands
from .options import Data, Force, LoadingOptions, Printing, command
from .output import heavy_imports, print_json, print_notes
from .streams import say

SERVE_EXAMPLE = (
    "Example: gradmerge federated serve ./merged --clients 2 --certificate server.pem --key server.key "
    "--authority ca.pem -o ./refined"
)
JOIN_EXAMPLE = (
    "Examples: gradmerge federated join localhost:8000 --root-certificates ca.pem --name yelp --model ./merged "
    "--data yelp.jsonl   ·   gradmerge federated join localhost:8000 --root-certificates ca.pem --name yelp "
    "--model ./merged --data yelp.jsonl --noise 8 --epsilon 8 --ledger yelp.ledger"
)
APP_EXAMPLE = "Example: gradmerge federated app ./app"
Insecure = Annotated[bool, typer.Option("--insecure", help="Without TLS: what crosses can be read and changed.")]

app = Commands(help="Refine a merge with owners who keep their data, over Flower.")


@dataclass(frozen=True)
class RefiningOptions:
    """A refinement: options of :class:`gradmerge.federated.settings.ServerSettings`."""

    clients: Annotated[int, typer.Option(metavar="N", min=1, help="How many clients to wait for.")] = 2
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds at most.")] = 2
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to wait for the clients.")] = 600.0
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds that an answer may take.")] = 600.0
    on_failure: Annotated[
        str, typer.Option(metavar="HOW", help="When a client fails: stop, or continue without it.")
    ] = "stop"
    minimum: Annotated[int, typer.Option(metavar="N", min=1, help="With continue: so many clients must be left.")] = 1
    penalty: Annotated[
        str,
        typer.Option(metavar="P", help="Curvature folder, identity:c or none; by default as MERGED's record."),
    ] = ""
    base: Annotated[str, typer.Option(metavar="B", help="The base that the penalty holds to.")] = ""
    force: Force = False


@dataclass(frozen=True)
class ListeningOptions:
    """Where the server listens: options of :func:`gradmerge.federated.hosting.serve`."""

    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="The port to listen at.")] = 8000
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")] = None
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None
    authority: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate of who signed it.")] = None
    insecure: Insecure = False


@app.command("serve", short_help="Refine with clients, as the server.", epilog=SERVE_EXAMPLE)
@command
def serve(
    *,
    model: Annotated[str, typer.Argument(metavar="MERGED", help="Model folder, Hub id or LoRA adapter folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    refining: RefiningOptions,
    listening: ListeningOptions,
    device: Annotated[
        str, typer.Option(metavar="D", help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.")
    ] = "auto",
    task: Annotated[str, typer.Option(metavar="T", help="classify, causal-lm, seq2seq, image, or auto.")] = "auto",
    printing: Printing,
) -> None:
    """Refine a merge on rows that stay with their owners: the server. Clients come by `gradmerge federated join`.

    Steps are those of `gradmerge refine --with newton`; adamw needs the rows at hand.
    """
    with heavy_imports():
        from ..federated.hosting import serve as run
        from ..federated.settings import ServerSettings
        from ..tasks.loading import DEFAULTS

    given: Any = {**DEFAULTS, "device": device, "task": task}
    settings = ServerSettings(model=model, loading=given, out=str(out), **asdict(refining))
    with _ends_in_order():
        done = run(settings, **asdict(listening), say=_told(printing))
    if printing.json:
        print_json(done)
        return
    print_notes(done["notes"], printing.quiet)
    if not printing.quiet:
        say(f"{out}: written" if done["improved"] else f"{out}: written, as it was: {done['stopped']}")


@dataclass(frozen=True)
class TellingOptions:
    """A task, and what may be told of it: options of :class:`gradmerge.federated.settings.ClientSettings`."""

    data: Data
    valid: Annotated[
        str, typer.Option(metavar="SRC", help="Rows to judge by; by default a tenth of the data is held back.")
    ] = ""
    examples: Annotated[int, typer.Option(metavar="N", help="How many examples the rows stand for; 0: as many.")] = 0
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Decides which rows are held back.")] = 0
    least_rows: Annotated[
        int, typer.Option(metavar="N", min=1, help="Answer only with so many rows, without those held back.")
    ] = 1
    most_gradients: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Tell so many gradients at most, 0: any; a round asks for up to three."),
    ] = 0
    noise: Annotated[
        float, typer.Option(metavar="Z", help="Differential privacy: noise as a multiple of the bounds; 0: none.")
    ] = 0.0
    clip: Annotated[float, typer.Option(metavar="C", help="With noise: the longest gradient of a row.")] = 1.0
    clip_loss: Annotated[float, typer.Option(metavar="C", help="With noise: the highest loss of a row, nats.")] = 10.0
    clip_curvature: Annotated[
        float, typer.Option(metavar="C", help="With noise: the largest curvature of a row along directions.")
    ] = 1.0
    epsilon: Annotated[float, typer.Option(metavar="E", help="With noise: the budget; no answer goes beyond.")] = 0.0
    delta: Annotated[float, typer.Option(metavar="D", help="With noise: the δ of the budget.")] = 1e-5
    ledger: Annotated[
        str, typer.Option(metavar="FILE", help="With noise: the file that counts the answers, for ever.")
    ] = ""


@dataclass(frozen=True)
class JoiningOptions:
    """How the server is reached: options of :func:`gradmerge.federated.joining.join`."""

    certificates: Annotated[
        Path | None,
        typer.Option("--root-certificates", metavar="FILE", help="The authority of the server's certificate, PEM."),
    ] = None
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The client's private key, where the SuperLink asks for it.")
    ] = None
    insecure: Insecure = False
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to try to reach the server.")] = 600.0


@app.command("join", short_help="Answer for data that stay here.", epilog=JOIN_EXAMPLE)
@command
def join(
    *,
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="The task's name, which others see.")],
    model: Annotated[str, typer.Option(metavar="MERGED", help="A copy of the model that the server refines.")],
    telling: TellingOptions,
    joining: JoiningOptions,
    loading: LoadingOptions,
    printing: Printing,
) -> None:
    """Take part in a refinement with data that stay here: a client. It answers questions about a model, and ends."""
    with heavy_imports():
        from ..federated.joining import join as run
        from ..federated.settings import ClientSettings

    settings = ClientSettings(model=model, loading=loading.as_keywords(), name=name, **asdict(telling))
    with _ends_in_order():
        answered = run(settings, superlink, **asdict(joining), say=_told(printing))
    if printing.json:
        print_json({"name": name, "answers": answered})
    elif not printing.quiet:
        say(f"{name}: done, {answered} answers")


@app.command("app", short_help="Write the app that `flwr run` takes.", epilog=APP_EXAMPLE)
@command
def flower_app(
    *,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder to write pyproject.toml into.")],
    printing: Printing,
) -> None:
    """Write a Flower app of our server and client, for those who run Flower's own SuperLink and SuperNodes."""
    with heavy_imports():
        from ..errors import InputError
        from ..federated.hosting import write_app
        from ..federated.settings import defaults_of_server

    if (folder / "pyproject.toml").exists():
        raise InputError(f"{folder / 'pyproject.toml'}: is there already")
    write_app(folder, defaults_of_server())
    if not printing.silent:
        say(f"{folder}/pyproject.toml: written")


def _told(printing: Printing) -> Callable[[str], None]:
    """What is told of what happens."""
    return (lambda text: None) if printing.silent else say


@contextlib.contextmanager
def _ends_in_order() -> Iterator[None]:
    """SIGTERM as an exit, so that nothing is left half-written, and a client says that it leaves."""

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
