"""`python -m experiments.sentiment`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import gradmerge as gm

from ..common.arguments import add_arguments, check_arguments, command, machine, stored_results
from ..common.results import over_seeds, write_results
from ..common.stages import Stages
from .data import SETS, Row, from_files, from_hub, local_files, write_splits
from .models import is_seq2seq
from .pipeline import Run, run_seed
from .report import draw, tables
from .settings import Settings, settings_for
from .tiny import made_up, make_encoder

DESCRIPTION = """\
Merge four sentiment tasks into a model of IMDB.

Reproduces the tables sentiment_analysis, sentiment_analysis_mismatch_only and hessians of the paper and the right halves of its
figures mismatch and scaling_factors_fig; with an encoder-decoder as --model, the table t5. A pre-trained model is fine-tuned on
IMDB (the base), the base on Yelp, Rotten Tomatoes, SST-2 and Amazon, and these are merged by every rule; next to them stand a model
trained on all five at once and one trained on the four from the base. Stages and results go to --out; a run that was
stopped goes on where it was."""

EXAMPLES = """\
examples:
  python -m experiments.sentiment                                  RoBERTa and the Hub's data, as in the paper
  python -m experiments.sentiment --model google/t5-v1_1-base -o runs/sentiment-t5
  python -m experiments.sentiment --scale small --model ./minilm-l6 --data-dir ./data --seeds 0,1,2 --jobs 3
  python -m experiments.sentiment --scale tiny                     a minute on a CPU, with made-up data
  python -m experiments.sentiment --render-only                    tables and figures again, from results.json"""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m experiments.sentiment", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add_arguments(
        parser, "sentiment",
        model="folder or Hub id of a pre-trained encoder or encoder-decoder (full: FacebookAI/roberta-base; tiny: made up)",
        data="folder (or one with a folder text/) of NAME/{train,dev,test}.jsonl.gz with text and label, for the names "
        f"{', '.join(SETS)}; dev may be missing (full: from the Hub; tiny: made up)",
    )  # fmt: skip
    parser.add_argument("--render-only", action="store_true", help="write results.md and figures/ from results.json")
    args = parser.parse_args(arguments)
    if args.render_only:
        results = stored_results(parser, args.out)
    else:
        check_arguments(parser, args, *(("model", "data-dir") if args.scale == "small" else ()))
        try:
            results = _results(args)
        except gm.InputError as error:
            parser.error(str(error))
    write_results(args.out, results, tables(results))
    draw(results, args.out / "figures")
    print(f"{args.out / 'results.md'} and {args.out / 'figures'} are written")
    return 0


def _results(args: argparse.Namespace) -> dict[str, Any]:
    stages = Stages(args.out)
    made = args.scale == "tiny" and args.model is None
    model = str(stages.path("model")) if made else args.model or "FacebookAI/roberta-base"
    try:
        seq2seq = not made and is_seq2seq(model)
    except OSError as error:
        raise gm.InputError(f"--model {model}: {str(error).partition(chr(10))[0]}") from error
    settings = settings_for(args.scale, seq2seq=seq2seq, pretrained=not made)
    digest, rows = _data(args, stages, settings)
    if made:
        stages.run("model", lambda folder: make_encoder(folder, _texts(stages.path("data"))), after=["data"])
    run = Run(args.out, model, stages.path("data"), rows, digest, settings, args.device)
    return {
        "experiment": "sentiment",
        "command": command("experiments.sentiment", args),
        "scale": args.scale,
        "seq2seq": seq2seq,
        "settings": asdict(settings),
        "machine": machine(args.device),
        "rows": rows,
        "seeds": over_seeds(run_seed, args.seeds, args.jobs, run),
    }


def _data(args: argparse.Namespace, stages: Stages, settings: Settings) -> tuple[dict[str, Any], Any]:
    """What the data are made of, and how many rows there are."""
    cuts = {"dev_rows": settings.dev_rows, "train_rows": settings.train_rows, "test_rows": settings.test_rows}
    read: Callable[[str], dict[str, list[Row]]]
    source: Any
    if args.data_dir is not None:
        files = local_files(args.data_dir)
        source = {name: {s: p.stat().st_size for s, p in splits.items()} for name, splits in files.items()}
        read = lambda name: from_files(files[name])  # noqa: E731
    elif args.scale == "tiny":
        source, read = "made up", made_up
    else:
        source, read = "hub", partial(from_hub, dev_rows=settings.dev_rows)
    given = {"source": source, **cuts}
    make = lambda folder: write_splits(folder, {name: read(name) for name in SETS}, **cuts)  # noqa: E731
    return given, stages.run("data", make, given=given)


def _texts(data: Path) -> list[str]:
    return [row["text"] for name in SETS for row in gm.read_rows(str(data / name / "train.jsonl.gz")).rows]


if __name__ == "__main__":
    sys.exit(main())
