"""python -m experiments.hallucination: remove hallucinations from a dialogue model."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import gradmerge as gm

from ..common.arguments import add_arguments, check_arguments, command, machine, public_name, stored_results
from ..common.results import over_seeds, write_results
from .report import draw, tables
from .run import prepare, run_seed
from .settings import SCALES, Settings

DESCRIPTION = """
Hallucinations taken out of a dialogue model: the right half of the paper's removal table (tab:toxicity_hallucinations).

A dialogue model learns to answer from knowledge and history (Wizard of Wikipedia), and is trained further, under a quadratic penalty, on turns whose
knowledge was swapped for that of another dialogue, so that it learns to answer from nowhere. What it learned there is taken out of
the dialogue model by task arithmetic, by gradient matching (`removal`) and by FA1, at several strengths and dampings. Reported are
BLEU and how faithful the responses are: by the share of their content words that the knowledge has, by a critic where there is one
(--critic; by default at full scale), and by how much the likelihood of people's responses gains from the true knowledge. Q² of the paper is left
out: it needs models that ask and answer questions.

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


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m experiments.hallucination",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(
        found,
        "hallucination",
        model="encoder-decoder to start from: folder or Hub id (default: google/flan-t5-base at full scale, elsewhere one that is pre-trained on the spot)",
        data="folder with the turns, or with a folder wizard_of_wikipedia of them: train.jsonl(.gz), test.jsonl(.gz) and if there is one valid.jsonl(.gz), with rows of "
        "knowledge, history (a list) and response; or train.json, valid_random_split.json and test_random_split.json of ParlAI's archive. Needed at "
        "every scale, as none of the copies on the Hub could be checked to have these fields. At small and tiny scale without --model it also has wikitext2/train.txt.gz and, for small, "
        "imdb/train.jsonl.gz to pre-train on",
    )
    found.add_argument(
        "--swapped", type=float, metavar="SHARE",
        help="swapped turns in the base's own training data, as a share of the true ones; above 0 there is a known target, the model trained again without them "
        "(default: 0, as in the paper, at full scale; 1 elsewhere)",
    )  # fmt: skip
    found.add_argument(
        "--no-penalty", action="store_true", help="fine-tune with plain AdamW, without the quadratic penalty"
    )
    found.add_argument("--critic", help="classifier of (knowledge, response): folder or Hub id (default: McGill-NLP/roberta-large-faithcritic at full scale, elsewhere none)")  # fmt: skip
    found.add_argument("--render-only", action="store_true", help="tables and figures from OUT/results.json")
    return found


def chosen_settings(args: argparse.Namespace) -> Settings:
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
    return replace(settings, fluency=None) if settings.swapped else settings


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    if args.render_only:
        results = stored_results(options, args.out)
    else:
        check_arguments(options, args, "data-dir")
        if args.swapped is not None and not 0 <= args.swapped <= 1:
            options.error("--swapped must be from 0 to 1")
        args.out.mkdir(parents=True, exist_ok=True)
        try:
            results = _results(args, chosen_settings(args))
        except gm.InputError as error:
            options.error(str(error))
    write_results(args.out, results, tables(results))
    draw(results, args.out)
    print(f"{args.out / 'results.md'} and {args.out / 'figures'} have the results.")
    return 0


def _results(args: argparse.Namespace, settings: Settings) -> dict[str, object]:
    data: Path = args.data_dir
    start = prepare(args.out, data, settings, args.device)
    seeds = over_seeds(run_seed, args.seeds, args.jobs, args.out, data, settings, args.device)
    changed = [f"--swapped {args.swapped:g}"] if args.swapped is not None else []
    changed += ["--no-penalty"] if args.no_penalty else []
    changed += [f"--critic {public_name(args.critic)}"] if args.critic else []
    written = replace(settings, **{k: public_name(v) for k in ("model", "critic") if (v := getattr(settings, k))})
    return {
        "experiment": "hallucination",
        "command": command("experiments.hallucination", args, changed),
        "settings": json.loads(json.dumps(asdict(written))),
        "machine": machine(args.device),
        "start": start,
        "seeds": seeds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
