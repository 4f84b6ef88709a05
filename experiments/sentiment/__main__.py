"""`python -m experiments.sentiment`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gradmerge as gm

from ..common.plan import Plan
from ..common.program import head, make_parser, need, run_program
from ..common.seeds import run_seeds
from . import report
from .data import SETS
from .models import is_seq2seq
from .plan import plan
from .run import Seed, prepare
from .settings import Settings, pretrained_here, settings_for

DESCRIPTION = """\
Merge four sentiment tasks into a model of IMDB.

Reproduces the tables sentiment_analysis, sentiment_analysis_mismatch_only and hessians of the paper and the right
halves of its figures mismatch and scaling_factors_fig; with an encoder-decoder as --model, the table t5. A pre-trained
model is fine-tuned on IMDB (the base), the base on Yelp, Rotten Tomatoes, SST-2 and Amazon, and these are merged by
every method. Beside them stand a model trained on all five at once and one trained on the four from the base. Stages
and results go to --out; a run that was stopped goes on where it was.

With --model t5, at small and tiny scale, a small T5 is pre-trained first, once for all seeds: it learns to write down
spans that were taken out of plain text, the training texts of three of the sets and of WikiText-2."""

EXAMPLES = """\
examples:
  python -m experiments.sentiment                                  RoBERTa and the Hub's data, as in the paper
  python -m experiments.sentiment --model google/t5-v1_1-base -o runs/sentiment-t5
  python -m experiments.sentiment --scale small --model ./minilm-l6 --data-dir ./data --seeds 0,1,2 --jobs 3
  the same with the table of Hessians in full; stages that are there already are kept
    python -m experiments.sentiment --scale small --model ./minilm-l6 --data-dir ./data --seeds 0,1,2 --jobs 3 --grid
  python -m experiments.sentiment --scale small --model t5 --data-dir ./data --seeds 0,1,2 --jobs 3 -o runs/sentiment-t5
  python -m experiments.sentiment --scale tiny                     a minute on a CPU, with made-up data
  python -m experiments.sentiment --render-only                    tables and figures again, from results.json"""

ROBERTA = "FacebookAI/roberta-base"
#: As --model: a small T5 that is pre-trained here.
T5 = "t5"


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "sentiment",
        DESCRIPTION,
        EXAMPLES,
        model="folder or Hub id of a pre-trained encoder or encoder-decoder; at small and tiny scale also t5, which is "
        f"pre-trained here (full: {ROBERTA}; tiny: made up)",
        data="folder (or one with a folder text/) of NAME/{train,dev,test}.jsonl.gz with text and label, for the names "
        f"{', '.join(SETS)}; dev may be missing; with --model t5 at small scale also wikitext2/train.txt.gz "
        "(full: from the Hub; tiny: made up)",
    )
    add = parser.add_argument
    grid = (
        "also the table of Hessians in full: gradient matching with the data's labels, labels drawn from the model and "
        "all of them, summed, averaged and N times the mean of a sample, with Kronecker factors and with N · I, with "
        "the penalty H_0 and none, of models tuned plainly and under H_0"
    )
    add("--grid", action="store_true", help=grid)
    rows = "rows of a training set that curvature is measured on, the first ones, or all (default: 100000)"
    add("--curvature-rows", type=_rows, metavar="N", default=argparse.SUPPRESS, help=rows)
    return run_program(parser, argv, run, report, planned)


def _rows(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number from 1 on nor `all`")
    return int(text)


def settings_of(args: argparse.Namespace, *, seq2seq: bool, pretrained: bool) -> Settings:
    """The scale's settings with what the command line changes."""
    if args.model == T5:
        settings = pretrained_here(args.scale)
    else:
        settings = settings_for(args.scale, seq2seq=seq2seq, pretrained=pretrained)
    settings = replace(settings, grid=args.grid)
    return replace(settings, curvature_examples=args.curvature_rows) if "curvature_rows" in args else settings


def checked(args: argparse.Namespace) -> tuple[str | None, Path | str]:
    """The model, None where it is made here, and where the data are; where the options go together."""
    if args.scale == "small":
        need(args, "model", "data-dir")
    if args.model == T5 and args.grid:
        raise gm.InputError("--grid tunes models under H_0, which Adafactor cannot: not with --model t5")
    if args.model == T5 and args.scale == "full":
        raise gm.InputError("--model t5 is small and pre-trained here: --scale small, or --model google/t5-v1_1-base")
    made = args.scale == "tiny"
    model = None if args.model == T5 else args.model or (None if made else ROBERTA)
    return model, args.data_dir or ("made up" if made else "hub")


def planned(args: argparse.Namespace) -> Plan:
    """A model of the Hub is not looked at: its name says whether it is an encoder-decoder."""
    model, source = checked(args)
    local = model is not None and Path(model).is_dir()
    seq2seq = model is not None and (is_seq2seq(model) if local else "t5" in model.lower())
    return plan(settings_of(args, seq2seq=seq2seq, pretrained=model is not None), model, source)


def run(args: argparse.Namespace) -> dict[str, Any]:
    model, source = checked(args)
    try:
        seq2seq = args.model == T5 or (model is not None and is_seq2seq(model))
    except OSError as error:
        raise gm.InputError(f"--model {model}: {str(error).partition(chr(10))[0]}") from error
    settings = settings_of(args, seq2seq=seq2seq, pretrained=model is not None)
    shared = prepare(args.out, settings, args.device, model, source)
    options = ["--grid"] if args.grid else []
    if "curvature_rows" in args:
        options.append(f"--curvature-rows {args.curvature_rows or 'all'}")
    return {
        **head("sentiment", args, options),
        "scale": args.scale,
        "seq2seq": seq2seq,
        "settings": asdict(settings),
        "pretrained": shared.pretrained,
        "rows": shared.rows,
        "seeds": run_seeds(Seed, shared, args.seeds, args.jobs),
    }


if __name__ == "__main__":
    raise SystemExit(main())
