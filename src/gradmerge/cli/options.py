"""Options that commands on a model with data share."""

from __future__ import annotations

from typing import Annotated

import typer

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Model folder, Hub id (org/name@revision) or PEFT adapter folder.")
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        "-d",
        metavar="SRC",
        help="A .jsonl, .csv or .parquet file; .txt, each line an example of causal-lm, empty lines skipped; each also .gz; a "
        "folder of images by class; an .npz with x and y (or x_test and y_test: FILE.npz:test); or org/name:split of the Hub.",
    ),
]
Task = Annotated[
    str,
    typer.Option(
        "--task", metavar="T", help="classify, causal-lm, seq2seq, image, or auto: what the model is made for."
    ),
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="KEY=COLUMN,...",
        help="Which column is what, where names are not the usual ones. Keys: text, text2, label, labels, prompt, completion, "
        "messages, source, target, image. Several columns are joined by +.",
    ),
]
Limit = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Read at most N examples.")]
BatchSize = Annotated[
    int,
    typer.Option("--batch-size", metavar="N", min=1, help="Examples at once; the result does not depend on it."),
]
MaxLength = Annotated[
    int | None,
    typer.Option(
        "--max-length", metavar="N", help="Cut texts after N tokens; by default what the model allows, at most 1024."
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="D", help="cpu, cuda, cuda:1, …; auto is a GPU if there is one.")
]
Dtype = Annotated[
    str,
    typer.Option(
        "--dtype", metavar="TYPE", help="float32, bfloat16, float16, float64, or auto: as the model is stored."
    ),
]
Attn = Annotated[
    str | None,
    typer.Option("--attn", metavar="NAME", help="How attention is computed: eager, sdpa, flash_attention_2, …"),
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="T", help="Folder or Hub id of the tokenizer, if it is not MODEL's."),
]
Precision = Annotated[
    str, typer.Option("--precision", metavar="P", help="How to store it: float32, bfloat16 or log8 (one byte).")
]
