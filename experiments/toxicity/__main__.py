"""`python -m experiments.toxicity`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradmerge as gm

from ..common.program import head, make_parser, need, public_name, run_program
from ..common.removal import noise_floors
from ..common.seeds import run_seeds
from . import report
from .plan import plan
from .run import Seed, prepare
from .scorer import DETOXIFY, TFIDF
from .settings import SCALES

DESCRIPTION = """\
Takes toxicity out of a language model: the left half of the paper's table tab:toxicity_hallucinations.

The base is tuned on toxic comments. What it learned is taken out again by task arithmetic (negation) and by gradient
matching, at many strengths and dampings. Continuations of prompts are scored by a toxicity classifier, and perplexity
is measured on text that should stay.

--scale full   gpt2 (or --model EleutherAI/gpt-neo-1.3B, the paper's "GPT-J 1.3B"), Civil Comments with a toxicity of at
               least 0.8, WikiText-103, RealToxicityPrompts, and the classifier of Detoxify, all from the Hub. With
               --data-dir, local text instead.
--scale small  a small GPT-2 is trained from nothing on WikiText-2, reviews and comments of the Jigsaw challenge, toxic
               ones among them, and a second one on the same batches without the toxic comments: the model that a
               perfect removal would give. Influence steps and NPO stand beside the two methods, all at the same rise of
               perplexity, and several seeds give a noise floor.
"""

EXAMPLES = """\
examples:
  python -m experiments.toxicity --out runs/toxicity
  python -m experiments.toxicity --model EleutherAI/gpt-neo-1.3B --out runs/toxicity-1.3b
  python -m experiments.toxicity --scale small --data-dir data --seeds 0,1,2
  python -m experiments.toxicity --render-only --out runs/toxicity
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "toxicity",
        DESCRIPTION,
        EXAMPLES,
        model="causal language model, folder or Hub id, of --scale full (default: gpt2); the others make their own",
        data="folder with wikitext2/, jigsaw_toxic/ and real_toxicity_prompts/, for --scale small and tiny also imdb/, "
        "yelp/ and amazon/ (or with a folder text/ that has them)",
    )
    parser.add_argument(
        "--scorer",
        help=f"toxicity classifier: folder or Hub id, or {TFIDF} for one that is trained on jigsaw_toxic/ "
        f"(default: {DETOXIFY} at --scale full, {TFIDF} at the others)",
    )
    return run_program(parser, argv, run, report, lambda args: plan(SCALES[args.scale], *checked(args)))


def checked(args: argparse.Namespace) -> tuple[str | None, Path | None, str]:
    """The base, the folder of the data and the classifier, where they go together."""
    full = args.scale == "full"
    if not full:
        need(args, "data-dir")
        if args.model is not None:
            raise gm.InputError(f"--model: --scale {args.scale} trains a model of its own")
    scorer = args.scorer or (DETOXIFY if full else TFIDF)
    if scorer == TFIDF and args.data_dir is None:
        raise gm.InputError(f"--scorer {TFIDF} needs --data-dir")
    return (args.model or "gpt2") if full else None, args.data_dir, scorer


def run(args: argparse.Namespace) -> dict[str, Any]:
    model, data_dir, scorer = checked(args)
    settings = SCALES[args.scale]
    shared = prepare(args.out, settings, args.device, model, data_dir, scorer)
    options = [f"--scorer {public_name(scorer)}"] if args.scorer else []
    seeds = run_seeds(Seed, shared, args.seeds, args.jobs)
    compared = settings.comparing is not None
    return {
        **head("toxicity", args, options),
        "model": "a GPT-2 trained here" if model is None else public_name(model),
        "scorer": public_name(scorer),
        "settings": asdict(settings),
        "data": shared.counts,
        "floors": noise_floors([Seed(seed, shared).bench for seed in args.seeds]) if compared else None,
        "seeds": seeds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
