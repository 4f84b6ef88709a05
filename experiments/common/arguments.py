"""What every experiment's command line has."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import gradmerge as gm


def add_arguments(parser: argparse.ArgumentParser, name: str, *, model: str, data: str) -> None:
    """``model`` and ``data`` say what --model and --data-dir take, and what they are by default."""
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("runs") / name,
        help="folder of stages and results (default: %(default)s)",
    )
    parser.add_argument(
        "--scale", choices=("full", "small", "tiny"), default="full",
        help="full: the paper's set-up; small: local data and a small model, minutes on one GPU; tiny: a few examples, to try it (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--model", help=model)
    parser.add_argument("--data-dir", type=Path, help=data)
    parser.add_argument("--seeds", type=_numbers, default=[0], help="comma-separated (default: 0)")
    parser.add_argument(
        "--jobs", type=int, default=1, help="seeds that run at the same time, in processes of their own (default: 1)"
    )
    parser.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s"
    )


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def check_arguments(parser: argparse.ArgumentParser, args: argparse.Namespace, *needed: str) -> None:
    """Options that this scale cannot do without (``needed``), and folders that are not there: status 2, with a message."""
    for option in needed:
        if getattr(args, option.replace("-", "_")) is None:
            parser.error(f"--scale {args.scale} needs --{option}")
    if args.data_dir is not None and not args.data_dir.is_dir():
        parser.error(f"--data-dir {args.data_dir}: there is no such folder")
    if args.jobs < 1:
        parser.error("--jobs must be at least 1")


def stored_results(parser: argparse.ArgumentParser, out: Path) -> dict[str, Any]:
    """The ``results.json`` of an earlier run, for --render-only; status 2 where there is none."""
    file = out / "results.json"
    if not file.is_file():
        parser.error(f"--render-only: there is no {file}")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def public_name(place: str) -> str:
    """A folder without the path to it; an id of the Hub as it is."""
    return Path(place).name if Path(place).exists() else place


def machine(device: str) -> dict[str, Any]:
    """Where results come from."""
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else f"CPU, {os.cpu_count()} cores",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gradmerge": gm.__version__,
    }


def command(module: str, args: argparse.Namespace, options: Sequence[str] = ()) -> str:
    """The command that makes these results, with folders cut to their names."""
    parts = [f"python -m {module} --scale {args.scale}"]
    if args.model is not None:
        parts.append(f"--model {public_name(args.model)}")
    if args.data_dir is not None:
        parts.append("--data-dir DIR")
    parts.append(f"--seeds {','.join(map(str, args.seeds))}")
    return " ".join([*parts, *options])
