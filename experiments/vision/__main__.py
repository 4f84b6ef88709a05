"""Eight image tasks added to a vision transformer: the left panel of the paper's figure over scaling factors.

    python -m experiments.vision -o runs/vision
    python -m experiments.vision --scale small --data-dir DIR --seeds 0,1,2 -o runs/vision-small

The image encoder is fine-tuned on each of eight data sets with a fixed head for each, and the encoders are merged by task arithmetic
and by gradient matching with weights from 0 to 1, and by other methods. Reported is the accuracy on each test set.

full: the image encoder of CLIP ViT-B/32; a head is the text embeddings of the class names. Data comes from the Hub, or from DIR with,
for each task, NAME.npz (x_train, y_train, x_test, y_test, classes) or a folder NAME/{train,test}/CLASS/IMAGE. 30 GB of disk.
small: DIR, or DIR/images, has the .npz files mnist, fashion_mnist, kmnist, notmnist, usps, gtsrb, cifar10 and intel_scenes. A small
vision transformer is pre-trained on 1,000 rows of each, with heads, which are fixed from then on.
tiny: the same with a few dozen rows of each and a model of some thousand parameters.

Fine-tuning at full scale is the paper's: learning rate 1e-3, with a decoupled quadratic penalty towards the base. Its strength is not
in the paper; 100 is ours. The usual for CLIP, plain AdamW, is --learning-rate 1e-5 --strength 0.
Nor is the scalar of H_0 = scalar · I in the paper: here it is the mean entry of the tasks' curvature, and others are shown beside it.

A run that was stopped goes on where it was. results.json holds all numbers; --render-only makes tables and figures of it anew.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from transformers import AutoConfig

import gradmerge as gm
from experiments.common.arguments import add_arguments, check_arguments, command, machine, public_name, stored_results
from experiments.common.results import over_seeds, write_results
from experiments.common.stages import Stages

from .data import source_of, store_task
from .rendering import draw, tables
from .seeds import run_seed
from .settings import HUB, SCALES, Settings

CLIP = "openai/clip-vit-base-patch32"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m experiments.vision", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(
        parser,
        "vision",
        model=f"CLIP model whose image encoder is the base, a folder or a name on the Hub; --scale full only (default: {CLIP})",
        data="folder with the data sets, see above (--scale full: the Hub by default)",
    )
    parser.add_argument("--learning-rate", type=float, help="of fine-tuning, instead of the scale's")
    parser.add_argument(
        "--strength", type=float, help="of the penalty towards the base in fine-tuning, instead of the scale's; 0: plain AdamW"
    )  # fmt: skip
    parser.add_argument(
        "--weights", type=_numbers, help="comma-separated, with 1 among them (default: 0,0.1,…,1; tiny: 0,0.5,1)"
    )
    parser.add_argument("--render-only", action="store_true", help="tables and figures from results.json in --out")
    args = parser.parse_args(argv)
    if args.render_only:
        _render(args.out, stored_results(parser, args.out))
        return 0
    check_arguments(parser, args, *(() if args.scale == "full" else ("data-dir",)))
    if args.model is not None and args.scale != "full":
        parser.error(f"--scale {args.scale} makes its own model: leave --model out")
    try:
        _run(args)
    except gm.InputError as error:
        parser.error(str(error))
    return 0


def _numbers(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if 1.0 not in found:
        raise argparse.ArgumentTypeError("1 is not among the weights, but the tables show it")
    return found


def _run(args: argparse.Namespace) -> None:
    begun = time.perf_counter()
    settings = _settings(args)
    model = (args.model or CLIP) if args.scale == "full" else None
    size = _image_size(model, settings)
    sets = _store(args, settings, size)
    found = over_seeds(run_seed, args.seeds, args.jobs, args.out, settings, sets, size, model, args.device)
    options = [
        f"--{n.replace('_', '-')} {v:g}" for n in ("learning_rate", "strength") if (v := getattr(args, n)) is not None
    ]
    if args.weights is not None:
        options.append(f"--weights {','.join(f'{weight:g}' for weight in args.weights)}")
    results = {
        "experiment": "vision",
        "command": command("experiments.vision", args, options),
        "scale": args.scale,
        "model": model and public_name(model),
        "settings": json.loads(json.dumps(asdict(settings))),
        "machine": machine(args.device),
        "data": {task: {**facts, "classes": len(facts["classes"])} for task, facts in sets.items()},
        "seeds": {str(seed): one for seed, one in zip(args.seeds, found, strict=True)},
        "seconds": time.perf_counter() - begun,
    }
    _render(args.out, _as_before(args.out, results))


def _as_before(out: Path, results: dict[str, Any]) -> dict[str, Any]:
    """Results that are there already, if only the time they took is another: a run with nothing to do changes no file."""
    try:
        before = json.loads((out / "results.json").read_text())
    except (OSError, ValueError):
        return results
    same = {**results, "seconds": before.get("seconds")} == before
    return before if same else results


def _settings(args: argparse.Namespace) -> Settings:
    settings = SCALES[args.scale]
    given = {"learning_rate": args.learning_rate, "strength": args.strength}
    changes = {name: value for name, value in given.items() if value is not None}
    if args.weights is not None:
        settings = replace(settings, weights=args.weights)
    return replace(
        settings, fine_tuning=replace(settings.fine_tuning, **changes), joint=replace(settings.joint, **changes)
    )


def _image_size(model: str | None, settings: Settings) -> int:
    if model is None:
        return int(settings.encoder["image_size"])
    config = AutoConfig.from_pretrained(model)
    if config.model_type != "clip":
        raise gm.InputError(
            f"--model {model}: this is {config.model_type}, not CLIP, whose text encoder makes the heads"
        )
    return int(config.vision_config.image_size)


def _store(args: argparse.Namespace, settings: Settings, size: int) -> dict[str, Any]:
    """All data sets as arrays; seeds share them."""
    stages = Stages(args.out / "data")
    how = {
        "share": settings.validation_share,
        "most": settings.validation_most,
        "train_most": settings.train_most,
        "test_most": settings.test_most,
        "enlarge": settings.enlarge_first,
    }
    found = {}
    for task in settings.tasks:
        source = source_of(task, args.data_dir, HUB.get(task))
        found[task] = stages.run(
            task,
            lambda folder, source=source: store_task(source, folder, size, **how),
            given={"source": source, "size": size, **how},
        )
    return found


def _render(out: Path, results: dict[str, Any]) -> None:
    write_results(out, results, tables(results))
    draw(results, out / "figures")


if __name__ == "__main__":
    raise SystemExit(main())
