"""`python -m experiments.hallucination`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import gradmerge as gm

from ..common.program import head, make_parser, need, public_name, run_program
from ..common.removal import noise_floors
from ..common.seeds import run_seeds
from . import report
from .plan import plan
from .run import Seed, prepare
from .settings import SCALES, Settings

DESCRIPTION = """
Hallucinations taken out of a dialogue model: the right half of the paper's removal table (tab:toxicity_hallucinations).

A dialogue model learns to answer from knowledge and history (Wizard of Wikipedia), and is trained further, under a
quadratic penalty, on turns whose knowledge was swapped for that of another dialogue, so that it learns to answer from
nowhere. What it learned there is taken out of the dialogue model by task arithmetic, by gradient matching (`removal`)
and by FA1, at several strengths and dampings. Reported are BLEU and how faithful the responses are: by the share of
their content words that the knowledge has, by a critic where there is one (--critic; by default at full scale), and by
how much the likelihood of people's responses gains from the true knowledge. Q² of the paper is left out: it needs
models that ask and answer questions.

Strength and damping are chosen on validation turns; the table at strength 1 is the paper's.
"""

EXAMPLES = """
examples:
  the paper's two models; DIR is the unpacked archive of Wizard of Wikipedia from ParlAI
    python -m experiments.hallucination --data-dir DIR --model google/flan-t5-base  -o runs/hallucination-base
    python -m experiments.hallucination --data-dir DIR --model google/flan-t5-large -o runs/hallucination-large
  a small model pre-trained on the spot, with a known target; DIR has wizard_of_wikipedia/, wikitext2/ and imdb/
    python -m experiments.hallucination --scale small --data-dir DIR --seeds 0,1,2
  the same in the paper's set-up, in which the base saw no swapped turn
    python -m experiments.hallucination --scale small --data-dir DIR --swapped 0 -o runs/hallucination-plain
  tables and figures once more, without models
    python -m experiments.hallucination --render-only -o runs/hallucination
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "hallucination",
        DESCRIPTION,
        EXAMPLES,
        model="encoder-decoder to start from: folder or Hub id (default: google/flan-t5-base at full scale, elsewhere "
        "one that is pre-trained on the spot)",
        data="folder with the turns, or with a folder wizard_of_wikipedia of them: train.jsonl(.gz), test.jsonl(.gz) "
        "and if there is one valid.jsonl(.gz), with rows of knowledge, history (a list) and response; or train.json, "
        "valid_random_split.json and test_random_split.json of ParlAI's archive. Needed at every scale, as none of the "
        "copies on the Hub could be checked to have these fields. At small and tiny scale without --model it also has "
        "wikitext2/train.txt.gz and, for small, imdb/train.jsonl.gz to pre-train on",
    )
    parser.add_argument(
        "--swapped",
        type=float,
        metavar="SHARE",
        help="swapped turns in the base's own training data, as a share of the true ones; above 0 there is a known "
        "target, the model trained again without them (default: 0, as in the paper, at full scale; 1 elsewhere)",
    )
    parser.add_argument(
        "--no-penalty", action="store_true", help="fine-tune with plain AdamW, without the quadratic penalty"
    )
    parser.add_argument(
        "--critic",
        help="classifier of (knowledge, response): folder or Hub id (default: McGill-NLP/roberta-large-faithcritic at "
        "full scale, elsewhere none)",
    )
    return run_program(parser, argv, run, report, lambda args: plan(checked(args), args.data_dir))


def settings_of(args: argparse.Namespace) -> Settings:
    """The scale's settings with what the command line changes."""
    settings = SCALES[args.scale]
    if args.model is not None:
        settings = replace(settings, model=args.model, pretraining=None)
    if args.swapped is not None:
        settings = replace(settings, swapped=args.swapped)
    if args.no_penalty:
        settings = replace(settings, penalty=False)
    if args.critic is not None:
        settings = replace(settings, critic=args.critic)
    return replace(settings, fluency=None) if settings.swapped else replace(settings, comparing=None, paper=True)


def checked(args: argparse.Namespace) -> Settings:
    """The settings, where the options go together."""
    need(args, "data-dir")
    if args.swapped is not None and not 0 <= args.swapped <= 1:
        raise gm.InputError("--swapped must be from 0 to 1")
    return settings_of(args)


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings = checked(args)
    shared = prepare(args.out, settings, args.device, args.data_dir)
    options = [f"--swapped {args.swapped:g}"] if args.swapped is not None else []
    options += ["--no-penalty"] if args.no_penalty else []
    options += [f"--critic {public_name(args.critic)}"] if args.critic else []
    written = replace(settings, **{k: public_name(v) for k in ("model", "critic") if (v := getattr(settings, k))})
    seeds = run_seeds(Seed, shared, args.seeds, args.jobs)
    compared = settings.comparing is not None
    return {
        **head("hallucination", args, options),
        "settings": asdict(written),
        "start": shared.start_facts,
        "floors": noise_floors([Seed(seed, shared).bench for seed in args.seeds]) if compared else None,
        "seeds": seeds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
