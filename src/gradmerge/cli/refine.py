"""`gradmerge refine`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import Force, LoadingOptions, Printing, named, on_processes
from .output import Durable, heavy_imports, print_json, print_notes, print_table, progress, typed
from .streams import say

EXAMPLE = (
    "Examples: gradmerge refine ./merged --data yelp=yelp.jsonl --data sst2=sst2.jsonl -o ./refined   ·   "
    "gradmerge refine ./merged --data yelp=yelp.jsonl --valid yelp=more.jsonl --with adamw --rounds 3 -o ./refined"
    "   ·   gradmerge refine ./merged --data yelp=yelp.jsonl --teacher yelp=./yelp-model -o ./refined"
)
NamedSource = Annotated[
    list[str],
    typer.Option("--data", "-d", metavar="NAME=SRC", help="Labelled rows of a task. Repeat it for each task."),
]


@on_processes
def refine(
    *,
    model: Annotated[
        str, typer.Argument(metavar="MERGED", help="Model folder, Hub id or LoRA adapter folder to begin with.")
    ],
    data: NamedSource,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="OUT", help="Folder to write.")],
    valid: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SRC", help="Rows to judge a task by; by default a tenth of its data is held back."),
    ] = None,
    method: Annotated[
        str, typer.Option("--with", metavar="HOW", help="newton: steps by curvature; adamw: passes at a searched rate.")
    ] = "newton",
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds at most; for adamw, passes.")] = 2,
    examples: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=N", help="How many examples a task stands for; by default its rows. Repeatable."),
    ] = None,
    teacher: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=MODEL", help="A model that knows a task: its answers count beside labels. Repeatable."
        ),
    ] = None,
    teaching: Annotated[
        float | None,
        typer.Option(metavar="S", help="Share of teachers' answers in the loss of a row (default: 0.5); 1: no labels."),
    ] = None,
    penalty: Annotated[
        str | None,
        typer.Option(
            metavar="P", help="Curvature folder, identity:c or none; by default the penalty that MERGED's record names."
        ),
    ] = None,
    base: Annotated[
        str | None, typer.Option(metavar="B", help="The base that the penalty holds to; by default MERGED's.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Decides which rows are held back.")] = 0,
    loading: LoadingOptions,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with a run that was stopped after a round.")] = False,
    force: Force = False,
    durable: Durable = False,
    printing: Printing,
) -> None:
    """Refine a merge on a few labelled rows of every task, towards the model trained on all of them.

    Never worse than MERGED on the rows held back, in the loss that it learns from.
    """
    sources, judged, teachers = named(data), named(valid or [], "valid"), named(teacher or [], "teacher")
    counts = {name: _whole(name, text) for name, text in named(examples or [], "examples").items()}
    with heavy_imports():
        from ..api.refining import refine as refine_model
        from ..report.refinement_page import metrics_table, verdict

    with progress(printing.silent, "rows") as shown:
        done = refine_model(
            model,
            sources,
            out=out,
            valid=judged,
            method=method,
            rounds=rounds,
            examples=counts,
            teachers=teachers,
            teaching=teaching,
            penalty=penalty,
            base=base,
            seed=seed,
            resume=resume,
            force=force,
            durable=durable,
            progress=shown,
            processes=True,
            command=typed(),
            **loading.as_keywords(),
        )
    if printing.json:
        tasks = {name: {"before": done.before[name], "after": done.after[name]} for name in done.before}
        facts = {"output": str(out), "method": done.method, "improved": done.improved, "tasks": tasks}
        facts |= {"teachers": teachers, "teaching": done.teaching} if teachers else {}
        rest = {"stopped": done.stopped, "passes": dict(done.passes), "seconds": done.seconds, "notes": done.notes}
        print_json({**facts, "rounds": [asdict(one) for one in done.rounds], **rest})
        return
    print_notes(done.notes, printing.quiet)
    if printing.quiet:
        return
    table = metrics_table(done)
    print_table(table.columns, table.rows, right=(1, 2, 4, 5, 6), digits=4)
    say("\n" + verdict(done)[0])
    say(f"{out}: written; report.html shows the rounds.")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(f"--examples {name}={text}: give a whole number") from None
