"""What storing curvature in fewer bits costs: accuracy of a gradient-matching merge, and bytes on disk.

    python -m benchmarks.precision --encoder MODEL --data DIR --json benchmarks/results/precision.json

fine-tunes an encoder on one sentiment data set and from there on others, estimates curvature, stores it as float32,
bfloat16 and log8, merges with each, and evaluates the merges. ``DIR/NAME/{train,test}.jsonl.gz`` hold rows with
``text`` and ``label``.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from experiments.common import training
from experiments.common.data import Collate
from experiments.common.training import Training
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gradmerge as gm
from gradmerge.curvature.format import PRECISIONS

from .timing import parser_of, say, text_table, write_report

TASKS = ("imdb", "yelp", "rotten_tomatoes", "sst2", "amazon")


def main() -> None:
    args = parse(__doc__)
    names = args.tasks.split(",")
    fine_tune_all(args, names)
    sizes = measure_all(args, names)
    accuracy = {"base": evaluate(args, args.work / names[0], names)}
    accuracy |= {precision: evaluate(args, merge(args, names, precision), names) for precision in PRECISIONS}
    accuracy |= {f"tuned on {name}": evaluate(args, args.work / name, names) for name in names[1:]}
    changes = {p: max(abs(accuracy[p][n] - accuracy["float32"][n]) for n in [*names, "mean"]) for p in PRECISIONS}
    facts = {"curvature_bytes_of_a_model": sizes, "largest_change": changes}
    write_report(args.json, **circumstances(args, names), accuracy=accuracy, **facts)
    rows = [[model, *(f"{100 * values[name]:.2f}" for name in values)] for model, values in accuracy.items()]
    print(text_table(["accuracy, %", *names, "mean"], rows), facts, sep="\n")


def parse(doc: str | None) -> argparse.Namespace:
    """Return the options of this benchmark and of benchmarks.ranking."""
    parser = parser_of(doc)
    parser.add_argument("--encoder", required=True, help="pre-trained encoder: folder or Hub id")
    parser.add_argument("--data", type=Path, required=True, help="folder with NAME/{train,test}.jsonl.gz")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names; the first is the base's")
    parser.add_argument("--work", type=Path, default=Path("bench-data/precision"), help="folder of the models")
    parser.add_argument("--limit", type=int, help="rows of each set at most, to try it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def circumstances(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """Return the machine and the settings of a run."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    settings = {"epochs": args.epochs, "limit": args.limit, "seed": args.seed}
    return {
        "machine": {"device": device, "torch": torch.__version__},
        "settings": {"encoder": Path(args.encoder).name, "tasks": names, **settings},
        "note": "of every set, as many rows as were at hand up to the limit",
    }


def rows_of(args: argparse.Namespace, name: str, split: str) -> str:
    """The file of a data set."""
    return str(args.data / name / f"{split}.jsonl.gz")


def fine_tune_all(args: argparse.Namespace, names: list[str]) -> None:
    """The base from the encoder, every other model from the base."""
    tokenizer = AutoTokenizer.from_pretrained(args.encoder)
    for place, name in enumerate(names):
        start = args.work / names[0] if place else args.encoder
        if not (args.work / name / "config.json").is_file():
            fine_tune(start, args.work / name, tokenizer, args, name)


def fine_tune(start: Any, out: Path, tokenizer: Any, args: argparse.Namespace, name: str) -> None:
    torch.manual_seed(args.seed)
    model = AutoModelForSequenceClassification.from_pretrained(start, num_labels=2, dtype=torch.float32).to(args.device)
    rows = gm.read_rows(rows_of(args, name, "train"), limit=args.limit).rows
    ids = tokenizer([row["text"] for row in rows], truncation=True, max_length=256)["input_ids"]
    examples = [{"input_ids": text, "labels": int(row["label"])} for text, row in zip(ids, rows, strict=True)]
    how = Training(5e-5, args.epochs, 32, warmup_steps=50)
    collate = Collate(tokenizer.pad_token_id)
    took = training.fine_tune(model, examples, collate, out, how, seed=args.seed, device=args.device)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    say(f"fine-tuned on {name}: last loss {took['last_loss']:.3f}")


def measure_all(args: argparse.Namespace, names: list[str]) -> dict[str, int]:
    """Curvature of every model on its training set, in every precision; bytes of one model's."""
    sizes = {}
    for name in names:
        folder = args.work / f"{name}-curvature"
        given = {"limit": args.limit, "batch_size": 64, "max_length": 256, "device": args.device}
        data = rows_of(args, name, "train")
        gm.estimate_curvature(str(args.work / name), data, out=folder / "float32", force=True, **given)
        whole = gm.Curvature.load(folder / "float32")
        for precision in PRECISIONS:
            if precision != "float32":
                whole.save(folder / precision, precision=precision, force=True)
            sizes[precision] = sum(file.stat().st_size for file in (folder / precision).iterdir())
    return sizes


def merge(args: argparse.Namespace, names: list[str], precision: str) -> Path:
    recipe = {
        "method": "gradient-matching",
        "base": {"model": f"./{names[0]}", "curvature": f"./{names[0]}-curvature/{precision}"},
        "models": [{"model": f"./{n}", "curvature": f"./{n}-curvature/{precision}"} for n in names[1:]],
    }
    path = args.work / f"{precision}.yml"
    path.write_text(json.dumps(recipe))
    gm.merge(path, args.work / f"merged-{precision}", force=True)
    return args.work / f"merged-{precision}"


def evaluate(args: argparse.Namespace, model: Path, names: list[str]) -> dict[str, float]:
    given = {"limit": args.limit, "batch_size": 64, "max_length": 256, "device": args.device}
    found = {name: gm.evaluate(str(model), rows_of(args, name, "test"), **given)["accuracy"] for name in names}
    return found | {"mean": sum(found.values()) / len(found)}


if __name__ == "__main__":
    main()
