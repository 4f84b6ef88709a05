"""python -m experiments.toxicity"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import gradmerge as gm

from ..common.arguments import add_arguments, check_arguments, command, machine, public_name, stored_results
from ..common.results import over_seeds, write_results
from ..common.stages import Stages
from .data import keep_prompts, prepare
from .run import run_seed
from .scorer import DETOXIFY, TFIDF
from .settings import SCALES
from .tables import figures, tables

DESCRIPTION = """\
Takes toxicity out of a language model: the left half of the paper's table tab:toxicity_hallucinations.

The base is tuned on toxic comments. What it learned is taken out again by task arithmetic (negation) and by gradient matching, at many strengths and
dampings. Continuations of prompts are scored by a toxicity classifier, and perplexity is measured on text that should stay.

--scale full   gpt2 (or --model EleutherAI/gpt-neo-1.3B, the paper's "GPT-J 1.3B"), Civil Comments with a toxicity of at least 0.8,
               WikiText-103, RealToxicityPrompts, and the classifier of Detoxify, all from the Hub. With --data-dir, local text instead.
--scale small  a small GPT-2 is trained from nothing on WikiText-2, reviews and comments of the Jigsaw challenge, toxic ones among them, and a
               second one on the same batches without the toxic comments: the model that a perfect removal would give.
"""
EXAMPLES = """\
examples:
  python -m experiments.toxicity --out runs/toxicity
  python -m experiments.toxicity --model EleutherAI/gpt-neo-1.3B --out runs/toxicity-1.3b
  python -m experiments.toxicity --scale small --data-dir data --seeds 0,1,2
  python -m experiments.toxicity --render-only --out runs/toxicity
"""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.toxicity", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(
        parser,
        "toxicity",
        model="causal language model, folder or Hub id, of --scale full (default: gpt2); the other scales make their own",
        data="folder with wikitext2/, jigsaw_toxic/ and real_toxicity_prompts/, for --scale small and tiny also imdb/, yelp/ and amazon/ "
        "(or with a folder text/ that has them)",
    )
    parser.add_argument(
        "--scorer",
        help=f"toxicity classifier: folder or Hub id, or {TFIDF} for one that is trained on jigsaw_toxic/ (default: {DETOXIFY} at "
        f"--scale full, {TFIDF} at the others)",
    )
    parser.add_argument("--render-only", action="store_true", help="tables and figures anew from OUT/results.json")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.render_only:
        render(args.out, stored_results(parser, args.out))
        return 0
    full = args.scale == "full"
    check_arguments(parser, args, *([] if full else ["data-dir"]))
    if args.model is not None and not full:
        parser.error(f"--model: --scale {args.scale} trains a model of its own")
    scorer = args.scorer or (DETOXIFY if full else TFIDF)
    if scorer == TFIDF and args.data_dir is None:
        parser.error(f"--scorer {TFIDF} needs --data-dir")
    model = (args.model or "gpt2") if full else None
    settings = SCALES[args.scale]
    args.out.mkdir(parents=True, exist_ok=True)
    given = {
        "packed": settings.packed, "more_kinds": settings.more_kinds, "characters": settings.characters, "held_out": settings.held_out,
        "first": None if settings.packed else settings.curvature_examples, "tokens": [settings.dev_tokens, settings.test_tokens],
        "vocabulary": settings.pretraining and settings.pretraining.vocabulary, "model": model,
        "files": _files(args.data_dir),
    }  # fmt: skip
    try:
        stages = Stages(args.out / "data")
        counts = stages.run("prepared", lambda folder: prepare(folder, args.data_dir, model, settings), given=given)
        asked = stages.run(
            "prompts",
            lambda folder: keep_prompts(folder, args.data_dir, settings),
            given={
                "count": [settings.prompts, settings.dev_prompts],
                "toxic": settings.toxic_prompts,
                "files": given["files"],
            },
        )
        seeds = over_seeds(
            run_seed,
            args.seeds,
            args.jobs,
            args.out,
            settings,
            model,
            args.data_dir,
            scorer,
            args.device,
            json.dumps(given),
        )
    except gm.InputError as error:
        parser.error(str(error))
    options = [f"--scorer {public_name(scorer)}"] if args.scorer else []
    results = {
        "experiment": "toxicity",
        "command": command("experiments.toxicity", args, options),
        "model": "a GPT-2 trained here" if model is None else public_name(model),
        "scorer": public_name(scorer),
        "settings": asdict(settings),
        "machine": machine(args.device),
        "data": {**counts, "prompts": asked},
        "seeds": [finite(seed) for seed in seeds],
    }
    render(args.out, json.loads(json.dumps(results)))
    print(f"{args.out}/results.md")
    return 0


def render(out: Path, results: dict[str, Any]) -> None:
    write_results(out, results, tables(results))
    figures(results, out / "figures")


def finite(value: Any) -> Any:
    """The same with None for numbers that are not finite, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _files(data_dir: Path | None) -> list[list[Any]]:
    """What local data is, by name and size."""
    if data_dir is None:
        return []
    return sorted([str(p.relative_to(data_dir)), p.stat().st_size] for p in data_dir.rglob("*.gz"))


if __name__ == "__main__":
    sys.exit(main())
