"""`python -m experiments.refinement`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import gradmerge as gm

from ..common.plan import Plan
from ..common.program import head, make_parser, need, run_program
from ..common.seeds import run_seeds
from ..sentiment.plan import plan as plan_text
from ..sentiment.run import prepare as prepare_text
from ..sentiment.settings import settings_for
from ..vision.plan import plan as plan_pictures
from ..vision.run import prepare as prepare_pictures
from ..vision.settings import PRETRAINED, SCALES
from . import report
from .pictures import PictureSeed
from .study import Wanted
from .text import TextSeed

DESCRIPTION = """\
Refine a merge with a few labelled rows per task, and compare it with joint training.

--tasks text: the models of `python -m experiments.sentiment`. --tasks images: those of `python -m experiments.vision`.
Beside the refinements by Newton and AdamW stand the base tuned on the same rows, and merges by diagonal and Kronecker
curvature. A run that was stopped goes on where it was."""

EXAMPLES = """\
examples:
  python -m experiments.refinement --tasks text --scale small --model ./minilm-l6 --data-dir ./data --seeds 0,1,2
  python -m experiments.refinement --tasks images --scale small --data-dir ./data --seeds 0,1,2 -o runs/refined-images
  python -m experiments.refinement --tasks text --scale tiny            a minute on a CPU, with made-up data"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "refinement",
        DESCRIPTION,
        EXAMPLES,
        model="folder or Hub id of a pre-trained encoder (text, tiny: made up; images: trained here by default)",
        data="folder with the data sets, as of the experiment whose models these are",
    )
    rows = "labelled rows per task or all, several comma-separated (default: 2048 of text, 1024 images; tiny: 24)"
    parser.add_argument("--rows", type=_sizes, help=rows)
    parser.add_argument("--tasks", choices=("text", "images"), default="text", help="default: %(default)s")
    return run_program(parser, argv, run, report, plan)


def _sizes(text: str) -> tuple[int | None, ...]:
    return tuple(None if part == "all" else int(part) for part in text.split(","))


def _as_text(sizes: Sequence[int | None]) -> str:
    return ",".join("all" if size is None else str(size) for size in sizes)


def checked(args: argparse.Namespace) -> tuple[Any, tuple[int | None, ...]]:
    """The settings of the models' own experiment, and numbers of rows, where the options go together."""
    if args.scale == "full":
        raise gm.InputError("--scale full: this experiment has the scales small and tiny")
    text = args.tasks == "text"
    need(args, *(("model", "data-dir") if args.scale == "small" else ()) if text else ("data-dir",))
    sizes = args.rows or (24 if args.scale == "tiny" else 2048 if text else 1024,)
    if text:
        return settings_for(args.scale, seq2seq=False, pretrained=args.model is not None), sizes
    return SCALES[args.scale] if args.model is None else PRETRAINED, sizes


def plan(args: argparse.Namespace) -> Plan:
    settings, sizes = checked(args)
    if args.tasks == "text":
        found = plan_text(settings, args.model, args.data_dir or "made up")
    else:
        found = plan_pictures(settings, args.model, args.data_dir)
    then = f"merges by diagonal and Kronecker curvature, and refined with {_as_text(sizes)} rows a task"
    return replace(found, then=[then])


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings, sizes = checked(args)
    kind: Any
    if args.tasks == "text":
        shared: Any = prepare_text(args.out, settings, args.device, args.model, args.data_dir or "made up")
        kind, tasks = TextSeed, TextSeed.tasks
    else:
        shared = prepare_pictures(args.out, settings, args.device, args.model, args.data_dir)
        kind, tasks = PictureSeed, settings.tasks
    seeds = run_seeds(kind, Wanted(args.out, settings, args.device, shared, sizes), args.seeds, args.jobs)
    return {
        **head("refinement", args, [f"--tasks {args.tasks} --rows {_as_text(sizes)}"]),
        "tasks": list(tasks),
        "judged_by_unseen": True,
        "settings": asdict(settings),
        "seeds": seeds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
