"""What storing curvature in fewer bits costs: accuracy of a gradient-matching merge, and bytes on disk.

    python -m benchmarks.precision --encoder MODEL --data DIR --json benchmarks/results/precision.json

fine-tunes an encoder on one sentiment data set and from there on others, estimates curvature, stores it as float32,
bfloat16 and log8, merges with each, and evaluates the merges. ``DIR/NAME/{train,test}.jsonl.gz`` hold rows with
``text`` and ``label``.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import gradmerge as gm
from gradmerge.curvature.format import PRECISIONS
from gradmerge.tasks.data.read import read_rows

TASKS = ("imdb", "yelp", "rotten_tomatoes", "sst2", "amazon")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    begun = time.perf_counter()
    names = args.tasks.split(",")
    fine_tune_all(args, names)
    sizes = measure_all(args, names)
    accuracy = {"base": evaluate(args, args.work / names[0], names)}
    for precision in PRECISIONS:
        accuracy[precision] = evaluate(args, merge(args, names, precision), names)
    for name in names[1:]:
        accuracy[f"tuned on {name}"] = evaluate(args, args.work / name, names)
    result = {
        "command": "python -m benchmarks.precision",
        "note": "of every set, as many rows as were at hand up to the limit",
        **circumstances(args, names),
        "curvature_bytes_of_a_model": sizes,
        "accuracy": accuracy,
        "largest_change": {
            p: max(abs(accuracy[p][n] - accuracy["float32"][n]) for n in [*names, "mean"]) for p in PRECISIONS
        },
        "seconds": time.perf_counter() - begun,
    }
    print_table(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--encoder", required=True, help="pre-trained encoder: folder or Hub id")
    parser.add_argument(
        "--data", type=Path, required=True, help="folder with NAME/train.jsonl.gz and NAME/test.jsonl.gz"
    )
    parser.add_argument("--tasks", default=",".join(TASKS), help="names; the first is the base's")
    parser.add_argument("--work", type=Path, default=Path("bench-data/precision"), help="where models go")
    parser.add_argument("--limit", type=int, help="rows of each set at most, to try it")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)


def circumstances(args: argparse.Namespace, names: list[str]) -> dict[str, Any]:
    """The machine and the settings of a run, as its results tell them."""
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    settings = {"epochs": args.epochs, "limit": args.limit, "seed": args.seed}
    return {
        "machine": {"device": device, "torch": torch.__version__},
        "settings": {"encoder": Path(args.encoder).name, "tasks": names, **settings},
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
    rows = read_rows(rows_of(args, name, "train"), limit=args.limit)
    texts, labels = list(rows.column("text")), list(rows.column("label"))
    order, batch = list(range(len(texts))), 32
    steps = args.epochs * -(-len(texts) // batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, step / 50) * max(0.0, 1 - step / steps)
    )
    model.train()
    for epoch in range(args.epochs):
        random.Random(args.seed + epoch).shuffle(order)
        for first in range(0, len(order), batch):
            chosen = order[first : first + batch]
            inputs = tokenizer(
                [texts[i] for i in chosen], truncation=True, max_length=256, padding=True, return_tensors="pt"
            )
            inputs["labels"] = torch.tensor([labels[i] for i in chosen])
            loss = model(**{key: value.to(args.device) for key, value in inputs.items()}).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    print(f"fine-tuned on {name}: last loss {float(loss.detach()):.3f}", flush=True)


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


def print_table(result: dict[str, Any]) -> None:
    names = [*result["settings"]["tasks"], "mean"]
    print(f"{'accuracy, %':<24}" + "".join(f"{name:>17}" for name in names))
    for model, values in result["accuracy"].items():
        print(f"{model:<24}" + "".join(f"{100 * values[name]:>17.2f}" for name in names))
    print("bytes of one model's curvature:", result["curvature_bytes_of_a_model"])
    print("largest change of an accuracy against float32:", result["largest_change"])


if __name__ == "__main__":
    main()
