"""`gradmerge federated serve`, `join` and `app`."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

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


@app.command("serve", short_help="Refine with clients, as the server.", epilog=SERVE_EXAMPLE)
@command
def serve(
    *,
    model: Annotated[str, typer.Argument(metavar="MERGED", help="Model folder, Hub id or LoRA adapter folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    clients: Annotated[int, typer.Option(metavar="N", min=1, help="How many clients to wait for.")] = 2,
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds at most.")] = 2,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="The port to listen at.")] = 8000,
    certificate: Annotated[Path | None, typer.Option(metavar="FILE", help="The server's certificate, PEM.")] = None,
    key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, PEM.")] = None,
    authority: Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate of who signed it.")] = None,
    insecure: Insecure = False,
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to wait for the clients.")] = 600.0,
    timeout: Annotated[float, typer.Option(metavar="S", help="Seconds that an answer may take.")] = 600.0,
    on_failure: Annotated[
        str, typer.Option(metavar="HOW", help="When a client fails: stop, or continue without it.")
    ] = "stop",
    minimum: Annotated[int, typer.Option(metavar="N", min=1, help="With continue: so many clients must be left.")] = 1,
    penalty: Annotated[
        str | None,
        typer.Option(metavar="P", help="Curvature folder, identity:c or none; by default as MERGED's record."),
    ] = None,
    base: Annotated[str | None, typer.Option(metavar="B", help="The base that the penalty holds to.")] = None,
    device: Annotated[
        str, typer.Option(metavar="D", help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.")
    ] = "auto",
    task: Annotated[str, typer.Option(metavar="T", help="classify, causal-lm, seq2seq, image, or auto.")] = "auto",
    force: Force = False,
    printing: Printing,
) -> None:
    """Refine a merge on rows that stay with their owners: the server. Clients come by `gradmerge federated join`.

    Steps are those of `gradmerge refine --with newton`; adamw needs the rows at hand.
    """
    with heavy_imports():
        from ..federated.hosting import serve as run
        from ..federated.settings import ServerSettings
        from ..tasks.loading import DEFAULTS

    settings = ServerSettings(
        model=model,
        loading={**DEFAULTS, "device": device, "task": task},
        out=str(out),
        clients=clients,
        rounds=rounds,
        wait=wait,
        timeout=timeout,
        on_failure=on_failure,
        minimum=minimum,
        penalty=penalty or "",
        base=base or "",
        force=force,
    )
    with _ends_in_order():
        done = run(
            settings,
            host=host,
            port=port,
            certificate=certificate,
            key=key,
            authority=authority,
            insecure=insecure,
            say=lambda text: None if printing.silent else say(text),
        )
    if printing.json:
        print_json(done)
        return
    print_notes(done["notes"], printing.quiet)
    if not printing.quiet:
        say(f"{out}: written" if done["improved"] else f"{out}: written, as it was: {done['stopped']}")


@app.command("join", short_help="Answer for data that stay here.", epilog=JOIN_EXAMPLE)
@command
def join(
    *,
    superlink: Annotated[str, typer.Argument(metavar="HOST:PORT", help="The server.")],
    name: Annotated[str, typer.Option(metavar="NAME", help="The task's name, which others see.")],
    model: Annotated[str, typer.Option(metavar="MERGED", help="A copy of the model that the server refines.")],
    data: Data,
    valid: Annotated[
        str | None, typer.Option(metavar="SRC", help="Rows to judge by; by default a tenth of the data is held back.")
    ] = None,
    examples: Annotated[int, typer.Option(metavar="N", help="How many examples the rows stand for; 0: as many.")] = 0,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Decides which rows are held back.")] = 0,
    root_certificates: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The authority of the server's certificate, PEM.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The client's private key, where the SuperLink asks for it.")
    ] = None,
    insecure: Insecure = False,
    wait: Annotated[float, typer.Option(metavar="S", help="Seconds to try to reach the server.")] = 600.0,
    least_rows: Annotated[
        int, typer.Option(metavar="N", min=1, help="Answer only with so many rows, without those held back.")
    ] = 1,
    most_gradients: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Tell so many gradients at most, 0: any; a round asks for up to three."),
    ] = 0,
    noise: Annotated[
        float, typer.Option(metavar="Z", help="Differential privacy: noise as a multiple of the bounds; 0: none.")
    ] = 0.0,
    clip: Annotated[float, typer.Option(metavar="C", help="With noise: the longest gradient of a row.")] = 1.0,
    clip_loss: Annotated[float, typer.Option(metavar="C", help="With noise: the highest loss of a row, nats.")] = 10.0,
    clip_curvature: Annotated[
        float, typer.Option(metavar="C", help="With noise: the largest curvature of a row along directions.")
    ] = 1.0,
    epsilon: Annotated[float, typer.Option(metavar="E", help="With noise: the budget; no answer goes beyond.")] = 0.0,
    delta: Annotated[float, typer.Option(metavar="D", help="With noise: the δ of the budget.")] = 1e-5,
    ledger: Annotated[
        str | None, typer.Option(metavar="FILE", help="With noise: the file that counts the answers, for ever.")
    ] = None,
    loading: LoadingOptions,
    printing: Printing,
) -> None:
    """Take part in a refinement with data that stay here: a client. It answers questions about a model, and ends."""
    with heavy_imports():
        from ..federated.joining import join as run
        from ..federated.settings import ClientSettings

    settings = ClientSettings(
        model=model,
        loading=loading.as_keywords(),
        name=name,
        data=data,
        valid=valid or "",
        examples=examples,
        seed=seed,
        least_rows=least_rows,
        most_gradients=most_gradients,
        noise=noise,
        clip=clip,
        clip_loss=clip_loss,
        clip_curvature=clip_curvature,
        epsilon=epsilon,
        delta=delta,
        ledger=ledger or "",
    )
    with _ends_in_order():
        answered = run(
            settings,
            superlink,
            certificates=root_certificates,
            key=key,
            insecure=insecure,
            wait=wait,
            say=lambda text: None if printing.silent else say(text),
        )
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
