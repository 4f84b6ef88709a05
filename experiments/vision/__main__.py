"""`python -m experiments.vision`"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import gradmerge as gm

from ..common.program import head, make_parser, need, public_name, run_program
from ..common.seeds import run_seeds
from . import report
from .plan import plan
from .run import Seed, prepare
from .settings import CLIP, PRETRAINED, SCALES, Settings

DESCRIPTION = """\
Eight image tasks added to a vision transformer: the left panel of the paper's figure over scaling factors.

The image encoder is fine-tuned on each of eight data sets with a fixed head for each, and the encoders are merged by
task arithmetic and by gradient matching with weights from 0 to 1, and by other methods. Reported is the accuracy on
each test set.

full: the image encoder of CLIP ViT-B/32; a head is the text embeddings of the class names. Data comes from the Hub, or
from DIR with, for each task, NAME.npz (x_train, y_train, x_test, y_test, classes) or a folder
NAME/{train,test}/CLASS/IMAGE. 30 GB of disk.
small: DIR, or DIR/images, has the .npz files mnist, fashion_mnist, kmnist, notmnist, usps, gtsrb, cifar10 and
intel_scenes. A small vision transformer is pre-trained on 1,000 rows of each, with heads, which are fixed from then on;
or, with --model, one that others trained is the base, and heads are logistic regressions from its features.
tiny: the same with a few dozen rows of each and a model of some thousand parameters.

Fine-tuning at full scale is the paper's: learning rate 1e-3, with a decoupled quadratic penalty towards the base. Its
strength is not in the paper; 100 is ours. The usual for CLIP, plain AdamW, is --learning-rate 1e-5 --strength 0. Nor is
the scalar of H_0 = scalar · I in the paper: here it is the mean entry of the tasks' curvature, and others are shown
beside it.

A run that was stopped goes on where it was. results.json holds all numbers."""

EXAMPLES = """\
examples:
  python -m experiments.vision -o runs/vision
  python -m experiments.vision --scale small --data-dir DIR --seeds 0,1,2 -o runs/vision-small
  python -m experiments.vision --scale small --model ./deit-tiny --data-dir DIR --seeds 0,1,2 -o runs/vision-deit
  python -m experiments.vision --render-only -o runs/vision        tables and figures again, from results.json"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(
        "vision",
        DESCRIPTION,
        EXAMPLES,
        model=f"the base, folder or Hub id; full: of CLIP (default: {CLIP}); small: a vision transformer (vit)",
        data="folder with the data sets, see above (--scale full: the Hub by default)",
    )
    add = parser.add_argument
    add("--learning-rate", type=float, help="of fine-tuning, instead of the scale's")
    held = "of the penalty towards the base in fine-tuning, instead of the scale's; 0: plain AdamW"
    add("--strength", type=float, help=held)
    add("--weights", type=_weights, help="comma-separated, with 1 among them (default: 0,0.1,…,1; tiny: 0,0.5,1)")
    return run_program(parser, argv, run, report, lambda args: plan(*checked(args), args.data_dir))


def _weights(text: str) -> tuple[float, ...]:
    found = tuple(float(part) for part in text.split(","))
    if 1.0 not in found:
        raise argparse.ArgumentTypeError("1 is not among the weights, but the tables show it")
    return found


def settings_of(args: argparse.Namespace) -> Settings:
    """The scale's settings with what the command line changes."""
    settings = PRETRAINED if args.scale == "small" and args.model is not None else SCALES[args.scale]
    given = {"learning_rate": args.learning_rate, "strength": args.strength}
    changes = {name: value for name, value in given.items() if value is not None}
    if args.weights is not None:
        settings = replace(settings, weights=args.weights)
    return replace(
        settings, fine_tuning=replace(settings.fine_tuning, **changes), joint=replace(settings.joint, **changes)
    )


def checked(args: argparse.Namespace) -> tuple[Settings, str | None]:
    """The settings and the base, where the options go together."""
    if args.scale != "full":
        need(args, "data-dir")
        if args.model is not None and args.scale == "tiny":
            raise gm.InputError(f"--scale {args.scale} makes its own model: leave --model out")
    return settings_of(args), (args.model or CLIP) if args.scale == "full" else args.model


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings, model = checked(args)
    shared = prepare(args.out, settings, args.device, model, args.data_dir)
    found = run_seeds(Seed, shared, args.seeds, args.jobs)
    changed = {"learning-rate": args.learning_rate, "strength": args.strength}
    options = [f"--{name} {value:g}" for name, value in changed.items() if value is not None]
    if args.weights is not None:
        options.append(f"--weights {','.join(f'{weight:g}' for weight in args.weights)}")
    return {
        **head("vision", args, options),
        "scale": args.scale,
        "model": model and public_name(model),
        "settings": asdict(settings),
        "data": {task: {**facts, "classes": len(facts["classes"])} for task, facts in shared.sets.items()},
        "seeds": {str(seed): one for seed, one in zip(args.seeds, found, strict=True)},
    }


if __name__ == "__main__":
    raise SystemExit(main())
