"""Merging on disk: gradmerge against mergekit, against a plain copy, and against itself on a larger model.

    python -m benchmarks.merge --data bench-data --mergekit .venv-mergekit/bin/mergekit-yaml

makes three Llama checkpoints of 1.1 B parameters in bf16 (once; they stay in the data folder), runs both programs in
turn on warm files, prints one table and writes every measurement as JSON. The exit status is 0 unless a run fails. All
of it takes up to 35 GB of disk at a time; `--cases` runs a part.
"""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .timing import (
    GIB,
    RunFailed,
    apart,
    compiled,
    machine,
    mergekit_versions,
    parser_of,
    say,
    size,
    text_table,
    timed,
    versions,
    warm,
    weights,
    write_report,
)

CASES = ("copy", "average", "task-arithmetic", "ties", "gradient-matching", "large")
#: Names of the programs in the table.
OURS, THEIRS, THEIR_BEST = "gradmerge", "mergekit", "mergekit, shards of 500M"
BEST_FLAGS = ("--out-shard-size", "500M")
TUNED = ("tuned-1", "tuned-2")


@dataclass
class Measurement:
    """One run of one command."""

    case: str
    program: str
    wall_s: float
    peak_rss_bytes: int
    disk_read_bytes: int
    moved_bytes: int | None = None
    """Read plus written by the program, from the page cache or not."""


@dataclass
class Row:
    """One line of the table. ``ratio`` says what of, and its unit."""

    case: str
    program: str
    runs: int
    wall_s: float
    peak_rss_gib: float
    moved_gb_s: float | None = None
    ratio: str = ""


# Checkpoints are made in a process of their own (``apart``): this one stays small, without PyTorch.
def make_small(folder: Path, layers: int) -> None:
    from .checkpoints import make_models

    make_models(folder, layers)


def make_curvatures(folder: Path, layers: int) -> None:
    from .checkpoints import make_curvature

    list(make_curvature(folder, layers))


def make_large(folder: Path, layers: int, times: float) -> None:
    """Make a base and a fine-tuned model with ``times`` the parameters of ``layers`` layers, and a link to it."""
    from .checkpoints import llama_config, llama_shapes, make_models

    def parameters(count: int) -> int:
        return sum(math.prod(shape) for shape in llama_shapes(llama_config(count)).values())

    more = layers
    while parameters(more) < times * parameters(layers):
        more += 1
    make_models(folder, more, tuned=1)
    if not (folder / "tuned-2").exists():
        (folder / "tuned-2").symlink_to("tuned-1")


def parameters_of(model: Path) -> int:
    """Return the number of parameters of a checkpoint in bfloat16."""
    found = 0
    for path in weights(model):
        with path.open("rb") as file:
            header = 8 + int.from_bytes(file.read(8), "little")
        found += (path.stat().st_size - header) // 2
    return found


class Benchmark:
    """The cases, and what they measured."""

    def __init__(self, data: Path, mergekit: Path | None, layers: int, repeats: int) -> None:
        self.data = data.absolute()
        self.mergekit = mergekit.absolute() if mergekit else None
        self.layers, self.repeats = layers, repeats
        self.measurements: list[Measurement] = []
        self.rows: list[Row] = []
        self.models = self.data / f"llama-{layers}-layers"
        self.base = self.models / "base"

    def copy(self) -> None:
        """What the disk and the page cache allow: one model, copied."""
        script = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
        for _ in range(self.repeats):
            self._measure("copy", "plain copy", [sys.executable, "-c", script, str(self.base)], self.base)
            self.measurements[-1].moved_bytes = 2 * size(self.base)
        self.rows.append(self._row("copy", "plain copy"))

    def average(self) -> None:
        self._against_mergekit("average", "linear", base=False)

    def task_arithmetic(self) -> None:
        self._against_mergekit("task-arithmetic", "task_arithmetic")

    def ties(self) -> None:
        """mergekit takes minutes for this, so it runs once, at its best setting."""
        self._against_mergekit("ties", "ties", their_runs=1, density=0.5)

    def gradient_matching(self) -> None:
        """Against our own task arithmetic, measured next to it."""
        say("making curvature files, unless they exist")
        apart(make_curvatures, self.models, self.layers)
        curvature = [self.models / f"curvature-{number}" for number in range(3)]
        warm(curvature)
        case, beside = "gradient-matching", "task-arithmetic, beside it"
        more = [word for path in curvature for word in ("--curvature", str(path))]
        for _ in range(self.repeats):
            self._measure_ours(beside, "task-arithmetic", self.models)
            self._measure_ours(case, case, self.models, *more)
        plain, row = self._row(beside, OURS), self._row(case, OURS)
        row.ratio = f"{row.wall_s / plain.wall_s:.2f} × task arithmetic's time"
        self.rows += [plain, row]
        for folder in curvature:
            shutil.rmtree(folder)

    def large(self) -> None:
        """Peak memory of a model four times as large."""
        small = [m for m in self.measurements if (m.case, m.program) == ("task-arithmetic", OURS)]
        if not small:
            self._measure_ours("task-arithmetic", "task-arithmetic", self.models)
            small = self.measurements[-1:]
            self.rows.append(self._row("task-arithmetic", OURS))
        folder, case = self.data / f"llama-{self.layers}-layers-times-4", "task-arithmetic, 4 × the parameters"
        say("making a model four times as large")
        try:
            apart(make_large, folder, self.layers, 4.0)
            self._measure_ours(case, "task-arithmetic", folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        row = self._row(case, OURS)
        growth = row.peak_rss_gib * GIB / max(m.peak_rss_bytes for m in small)
        row.ratio = f"{growth:.2f} × the small model's RSS"
        self.rows.append(row)

    def _against_mergekit(
        self, case: str, method: str, *, base: bool = True, their_runs: int | None = None, **options: float
    ) -> None:
        """Run both programs in turn; our time is compared with the better of mergekit's settings."""
        models = [{"model": str(self.models / name), "parameters": {"weight": 1.0, **options}} for name in TUNED]
        config: dict[str, Any] = {"merge_method": method, "dtype": "bfloat16", "models": models}
        config |= {"base_model": str(self.base)} if base else {}
        file = self.data / f"mergekit-{case}.json"  # JSON is YAML
        file.write_text(json.dumps(config, indent=2), "utf-8")
        settings = [(THEIR_BEST, BEST_FLAGS), *([] if their_runs else [(THEIRS, ())])] if self.mergekit else []
        more = [word for name, value in options.items() for word in ("--set", f"{name}={value}")]
        for number in range(self.repeats):
            self._measure_ours(case, case, self.models, *more, base=base)
            for program, flags in settings if number < (their_runs or self.repeats) else ():
                command = [str(self.mergekit), *flags, "--no-copy-tokenizer", "--quiet", str(file)]
                self._measure(case, program, command, self.base)
        row, theirs = self._row(case, OURS), [self._row(case, program) for program, _ in settings]
        if theirs:
            row.ratio = f"{min(r.wall_s for r in theirs) / row.wall_s:.1f} × faster than mergekit's best"
        self.rows += [row, *theirs]

    def _measure_ours(self, case: str, method: str, folder: Path, *more: str, base: bool = True) -> None:
        words = ["--base", str(folder / "base")] if base else []
        words += [word for name in TUNED for word in ("--model", str(folder / name))]
        command = [sys.executable, "-m", "gradmerge", "merge", "--method", method, *words, *more, "--json", "--out"]
        facts = json.loads(self._measure(case, OURS, command, folder / "base"))
        self.measurements[-1].moved_bytes = facts["bytes_read"] + facts["bytes_written"]

    def _measure(self, case: str, program: str, command: Sequence[str], like: Path) -> str:
        """Run a command whose last argument is the output folder, check that it wrote as many bytes as ``like``."""
        out = self.data / "out"
        try:
            run = timed(program, [*command, str(out)], out)
            if abs(size(out) - size(like)) > 0.01 * size(like):
                raise RunFailed(f"{program} wrote {size(out)} bytes of weights, not {size(like)}")
        finally:
            shutil.rmtree(out, ignore_errors=True)
        self.measurements.append(Measurement(case, program, run.wall_s, run.peak_rss_bytes, run.disk_read_bytes))
        say(f"{case}: {program}: {run.wall_s:.1f} s, {run.peak_rss_bytes / GIB:.2f} GiB")
        return run.output

    def _row(self, case: str, program: str) -> Row:
        """Return median time and highest peak of the runs."""
        runs = [m for m in self.measurements if (m.case, m.program) == (case, program)]
        wall = statistics.median(m.wall_s for m in runs)
        row = Row(case, program, len(runs), wall, max(m.peak_rss_bytes for m in runs) / GIB)
        if runs[0].moved_bytes is not None:
            row.moved_gb_s = runs[0].moved_bytes / wall / 1e9
        return row


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder for models and outputs")
    parser.add_argument(
        "--mergekit", type=Path, help="mergekit-yaml of an environment of its own (default: ours alone)"
    )
    parser.add_argument("--layers", type=int, default=22, help="layers of the model; 22 are 1.1 B parameters")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command (mergekit's TIES runs once)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    options = parser.parse_args()
    cases = options.cases.split(",")
    if unknown := [case for case in cases if case not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}")
    benchmark = Benchmark(options.data, options.mergekit, options.layers, options.repeats)
    compiled()
    say("making the models, unless they exist")
    apart(make_small, benchmark.models, options.layers)
    failures = []
    for case in cases:
        warm([benchmark.base, *(benchmark.models / name for name in TUNED)])
        try:
            getattr(benchmark, case.replace("-", "_"))()
        except (RunFailed, OSError) as error:
            failures.append(f"{case}: {error}")
            say(f"FAILED: {failures[-1]}")
    rows = benchmark.rows
    write_report(
        options.json or options.data / "merge.json",
        machine=machine(),
        versions=versions() | {"mergekit": mergekit_versions(benchmark.mergekit)},
        settings={
            "layers": options.layers,
            "repeats": options.repeats,
            "parameters": parameters_of(benchmark.base),
            "model_bytes": size(benchmark.base),
        },
        copy_gb_s=next((row.moved_gb_s for row in rows if row.case == "copy"), None),
        rows=[asdict(row) for row in rows],
        measurements=[asdict(m) for m in benchmark.measurements],
        failures=failures,
    )
    cells = [[r.case, r.program, str(r.runs), f"{r.wall_s:.2f}", f"{r.peak_rss_gib:.2f}", r.ratio] for r in rows]
    print(text_table(["case", "program", "runs", "wall s", "peak RSS GiB", "ratio"], cells))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
