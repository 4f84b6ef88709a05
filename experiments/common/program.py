"""The command line that every experiment has: options, a run or the results of an earlier one, tables and figures."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

import gradmerge as gm
from gradmerge.text import to_json

from .plan import Plan, as_text

Results = dict[str, Any]


class Report(Protocol):
    """The module ``report`` of an experiment."""

    def tables(self, results: Results) -> str:
        """results.md."""

    def draw(self, results: Results, folder: Path) -> None:
        """The figures, as SVG in ``folder``."""


def make_parser(name: str, description: str, examples: str, *, model: str, data: str) -> argparse.ArgumentParser:
    """The options of every experiment; ``model`` and ``data`` are the help of --model and --data-dir."""
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    default = Path("runs") / name
    add("-o", "--out", type=Path, default=default, help="folder of stages and results (default: %(default)s)")
    scales = (
        "full: the paper's set-up; small: local data and a small model, minutes on one GPU; "
        "tiny: a few examples, to try it (default: %(default)s)"
    )
    add("--scale", choices=("full", "small", "tiny"), default="full", help=scales)
    add("--model", help=model)
    add("--data-dir", type=Path, help=data)
    add("--seeds", type=_numbers, default=[0], help="comma-separated (default: 0)")
    add("--jobs", type=int, default=1, help="seeds that run at the same time, in processes of their own (default: 1)")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", default=device, help="default here: %(default)s")
    dry = "say what would be fetched and trained, and with what settings; nothing is fetched or written"
    add("--dry-run", action="store_true", help=dry)
    add("--render-only", action="store_true", help="write results.md and figures/ of --out again, from results.json")
    return parser


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def run_program(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    run: Callable[[argparse.Namespace], Results],
    report: Report,
    plan: Callable[[argparse.Namespace], Plan],
) -> int:
    """Run the experiment, or read what an earlier run found; then write results.json, results.md and figures/.

    Or only say what a run would do.

    Wrong input ends with status 2 and a message.
    """
    args = parser.parse_args(argv)
    try:
        if args.render_only:
            results = _stored(args.out)
        else:
            _check(args)
            if args.dry_run:
                print(as_text(plan(args), args.seeds))
                return 0
            disable_progress_bar()
            # Through JSON, so that tables see what they see with --render-only.
            results = json.loads(to_json(run(args)))
    except gm.InputError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    (args.out / "results.md").write_text(report.tables(results), "utf-8")
    report.draw(results, args.out / "figures")
    print(f"{args.out / 'results.md'} and {args.out / 'figures'} are written")
    return 0


def _stored(out: Path) -> Results:
    """The ``results.json`` of an earlier run."""
    file = out / "results.json"
    if not file.is_file():
        raise gm.InputError(f"--render-only: there is no {file}")
    found: Results = json.loads(file.read_text())
    return found


def _check(args: argparse.Namespace) -> None:
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise gm.InputError(f"--data-dir {args.data_dir}: there is no such folder")
    if args.jobs < 1:
        raise gm.InputError("--jobs must be at least 1")


def need(args: argparse.Namespace, *options: str) -> None:
    """Options that this scale cannot do without."""
    for option in options:
        if getattr(args, option.replace("-", "_")) is None:
            raise gm.InputError(f"--scale {args.scale} needs --{option}")


def public_name(place: str) -> str:
    """A folder without the path to it; an id of the Hub as it is."""
    return Path(place).name if Path(place).exists() else place


def head(name: str, args: argparse.Namespace, options: Sequence[str] = ()) -> Results:
    """What all results begin with: where they come from. ``options`` are the experiment's own, where given."""
    device = torch.cuda.get_device_name() if args.device.startswith("cuda") else f"CPU, {os.cpu_count()} cores"
    return {
        "experiment": name,
        "command": _command(name, args, options),
        "machine": {
            "device": device,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gradmerge": gm.__version__,
        },
    }


def _command(name: str, args: argparse.Namespace, options: Sequence[str]) -> str:
    """The command that makes these results, with folders cut to their names."""
    parts = [f"python -m experiments.{name} --scale {args.scale}"]
    if args.model is not None:
        parts.append(f"--model {public_name(args.model)}")
    if args.data_dir is not None:
        parts.append("--data-dir DIR")
    parts.append(f"--seeds {','.join(map(str, args.seeds))}")
    return " ".join([*parts, *options])
