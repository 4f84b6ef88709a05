"""What every experiment shares: the command line, stages that are not repeated, the loop over seeds, and the files.

An experiment declares an :class:`Experiment` and calls ``run_program`` with it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from pprint import pformat
from typing import Any

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

import gradmerge as gm
from gradmerge.text import to_json

from .report import Report, write_report

RECORD = "stage.json"
"""File in the folder of a finished stage: the hash of its settings, its result, and how long it took."""


def run_stage(folder: Path, make: Callable[[Path], Any], settings: Any = None, after: Sequence[str] = ()) -> Any:
    """Return the result of ``make(folder)``, or the result that an earlier run saved with the same settings.

    Args:
        make: Writes its files to ``folder`` and returns JSON values.
        settings: All settings that the result depends on.
        after: The stages that it reads: folders beside ``folder``, whose settings count too.
    """
    facts = [settings, [settings_hash(folder.with_name(name)) for name in after]]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()
    record = folder / RECORD
    if record.is_file() and settings_hash(folder) == digest:
        return json.loads(record.read_text("utf-8"))["result"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    print(f"{folder.parent.name}: {folder.name} …", flush=True)
    begun = time.perf_counter()
    result = json.loads(json.dumps(make(folder)))
    seconds = time.perf_counter() - begun
    unfinished = record.with_suffix(".partial")
    unfinished.write_text(json.dumps({"hash": digest, "seconds": seconds, "result": result}, indent=1) + "\n", "utf-8")
    unfinished.rename(record)
    print(f"{folder.parent.name}: {folder.name} done in {seconds:.0f} s", flush=True)
    return result


def settings_hash(folder: Path) -> str:
    """Return the hash of the settings of a finished stage."""
    found: str = json.loads((folder / RECORD).read_text("utf-8"))["hash"]
    return found


def stage_seconds(folder: Path) -> dict[str, float]:
    """Return how long each finished stage in ``folder`` took."""
    return {path.parent.name: json.loads(path.read_text("utf-8"))["seconds"] for path in folder.glob(f"*/{RECORD}")}


@dataclass(frozen=True)
class Run:
    """What the seeds of a run share."""

    out: Path
    settings: Any
    device: str
    model: str | None
    data_dir: Path | None
    shared: Any = None
    """What ``Experiment.prepare`` returned."""


class Seed(ABC):
    """One seed of a run. Its stages are folders in ``folder``."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.seed, self.settings = run, seed, run.settings
        self.folder: Path = run.out / f"seed-{seed}"

    def stage(self, name: str, make: Callable[[Path], Any], settings: Any = None, after: Sequence[str] = ()) -> Any:
        """Return the result of a stage of this seed; see :func:`run_stage`."""
        return run_stage(self.folder / name, make, settings, after)

    @abstractmethod
    def results(self) -> dict[str, Any]:
        """Return everything that ``results.json`` holds of the seed."""


@dataclass(frozen=True)
class Experiment:
    """One experiment: ``python -m experiments.NAME``."""

    name: str
    description: str
    scales: Mapping[str, Any]
    """Scale → settings, a dataclass."""
    seed: Callable[[Run, int], Seed]
    report: Report
    prepare: Callable[[Run], Any] = lambda run: None
    """Writes what the seeds share, and returns what they need to know of it."""
    facts: Callable[[Run, Sequence[Seed]], dict[str, Any]] = lambda run, seeds: {}
    """More keys of results.json, after the seeds ran."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """The paper's models and data sets on the Hub, for the dry run of the full scale."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options of its own: name → keywords of ``add_argument``."""
    adjust: Callable[[argparse.Namespace, Any], Any] = lambda args, settings: settings
    """The settings of a scale, changed by the options; raises InputError where options do not go together."""
    needs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Scale → options that it needs."""
    defaults: Mapping[str, Any] = field(default_factory=dict)


def run_program(experiment: Experiment, argv: Sequence[str] | None = None) -> int:
    """Run the experiment, or read the results of an earlier run; write results.json, results.md and figures/.

    Wrong input ends with status 2 and a message.
    """
    parser = _parser(experiment)
    args = parser.parse_args(argv)
    try:
        if args.render_only:
            results = _stored(args.out)
        else:
            settings = _settings(experiment, args)
            if args.dry_run:
                print(_plan(experiment, args, settings))
                return 0
            if args.scale == "full":
                raise gm.InputError("--scale full only documents the paper's setup: add --dry-run")
            results = _run(experiment, args, settings)
    except gm.InputError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    write_report(experiment.report, results, args.out)
    print(f"results.json, results.md and figures are in {args.out}")
    return 0


def _parser(experiment: Experiment) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m experiments.{experiment.name}",
        description=experiment.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    default = Path("runs") / experiment.name
    add("-o", "--out", type=Path, default=default, help="folder of stages and results (default: %(default)s)")
    scales = "small: as published; tiny: a few rows, to try it; full: the paper's setup, with --dry-run only"
    add("--scale", choices=list(experiment.scales), default="small", help=f"{scales} (default: %(default)s)")
    add("--model", help="folder of the pre-trained model")
    add("--data-dir", type=Path, help="folder with the data sets")
    add("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[0], help="default: 0")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default here: %(default)s")
    add("--dry-run", action="store_true", help="print the settings, and which models and data the scale uses")
    add("--render-only", action="store_true", help="write results.md and figures/ of --out again, from results.json")
    for name, keywords in experiment.options.items():
        add(f"--{name}", **keywords)
    parser.set_defaults(**experiment.defaults)
    return parser


def _settings(experiment: Experiment, args: argparse.Namespace) -> Any:
    if args.data_dir is not None and not args.data_dir.is_dir():
        raise gm.InputError(f"--data-dir {args.data_dir}: there is no such folder")
    for option in experiment.needs.get(args.scale, ()):
        if getattr(args, option.replace("-", "_")) is None:
            raise gm.InputError(f"--scale {args.scale} needs --{option}")
    return experiment.adjust(args, experiment.scales[args.scale])


def _stored(out: Path) -> dict[str, Any]:
    file = out / "results.json"
    if not file.is_file():
        raise gm.InputError(f"--render-only: there is no {file}")
    found: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return found


def _plan(experiment: Experiment, args: argparse.Namespace, settings: Any) -> str:
    sources = experiment.sources if args.scale == "full" else {"data": str(args.data_dir), "model": str(args.model)}
    lines = [f"{experiment.name}, scale {args.scale}, seeds {', '.join(map(str, args.seeds))}", ""]
    lines += [f"{name}: {place}" for name, place in sources.items()]
    return "\n".join([*lines, "", pformat(asdict(settings), sort_dicts=False, width=110), "Nothing was run."])


def _run(experiment: Experiment, args: argparse.Namespace, settings: Any) -> dict[str, Any]:
    disable_progress_bar()
    run = Run(args.out, settings, args.device, args.model, args.data_dir)
    run = Run(args.out, settings, args.device, args.model, args.data_dir, experiment.prepare(run))
    seeds = [experiment.seed(run, seed) for seed in args.seeds]
    found = [seed.results() for seed in seeds]
    results = {
        "experiment": experiment.name,
        "command": _command(experiment, args),
        "machine": {
            "device": torch.cuda.get_device_name() if args.device != "cpu" else f"CPU, {os.cpu_count()} cores",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "gradmerge": gm.__version__,
        },
        "scale": args.scale,
        "model": args.model and Path(args.model).name,
        "settings": asdict(settings),
        **experiment.facts(run, seeds),
        "seeds": found,
    }
    # Through JSON, so that tables see the same values with --render-only.
    reread: dict[str, Any] = json.loads(to_json(results))
    return reread


def _command(experiment: Experiment, args: argparse.Namespace) -> str:
    """The command that makes these results, with folders cut to their names."""
    parts = [f"python -m experiments.{experiment.name} --scale {args.scale}"]
    parts += [f"--model {Path(args.model).name}"] if args.model else []
    parts += ["--data-dir DIR"] if args.data_dir else []
    parts.append(f"--seeds {','.join(map(str, args.seeds))}")
    for name in experiment.options:
        value = getattr(args, name.replace("-", "_"))
        if value is True:
            parts.append(f"--{name}")
        elif value not in (None, False):
            parts.append(f"--{name} {value}")
    return " ".join(parts)
