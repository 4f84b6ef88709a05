"""Merging on disk: gradmerge against mergekit, against a plain copy, and against itself on a larger model.

    python -m benchmarks.merge --data bench-data --mergekit .venv-mergekit/bin/mergekit-yaml

makes three Llama checkpoints of 1.1 B parameters in bf16 (once; they stay in the data folder), runs both programs in
turn on warm files, prints one table and writes every single measurement as JSON. Speed never decides the exit status:
it is 0 unless a run fails. All of it takes up to 35 GB of disk at a time; `--cases` and `--skip-large` take less.

This process stays small on purpose, and makes the models in a process of its own: Linux counts the memory of the
process that starts a command towards the peak of the command.
"""

from __future__ import annotations

import argparse
import compileall
import json
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

GIB = 2**30
CASES = ("average", "task-arithmetic", "ties", "gradient-matching", "large")
COPY = "copy"

#: The bars, as the project has set them. Times: mergekit's over ours. Memory: GiB.
FASTER = {"average": 3.0, "task-arithmetic": 3.0, "ties": 20.0}
RSS_DATA_FREE, RSS_WITH_CURVATURE = 0.8, 1.2
RSS_GROWTH = 1.15
MATCHING_COST = 4.0

#: Names of the programs in the table.
OURS, THEIRS, THEIR_BEST = "gradmerge", "mergekit", "mergekit, shards of 500M"
BEST_FLAGS = ("--out-shard-size", "500M")


class RunFailed(Exception):
    """A command ended with an error, or without the output it should have written."""


@dataclass
class Measurement:
    """One run of one command."""

    case: str
    program: str
    command: list[str]
    wall_s: float
    peak_rss_bytes: int
    disk_read_bytes: int
    """What came from the disk and not from the page cache; near 0 when the files were warm."""
    moved_bytes: int | None = None
    """Read plus written by the program, from the page cache or not."""


@dataclass
class Bar:
    """A number that was asked for, and the number that was measured."""

    name: str
    value: float
    sense: str
    """≤ or ≥: what the value should be to the bar."""
    bar: float
    passed: bool

    @classmethod
    def at_most(cls, name: str, value: float, bar: float) -> Bar:
        return cls(name, value, "≤", bar, value <= bar)

    @classmethod
    def at_least(cls, name: str, value: float, bar: float) -> Bar:
        return cls(name, value, "≥", bar, value >= bar)


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
    bars: list[Bar] = field(default_factory=list)


def make_small(folder: Path, layers: int) -> None:
    from .checkpoints import make_models

    make_models(folder, layers)


def make_curvatures(folder: Path, layers: int) -> None:
    from .checkpoints import make_curvature

    list(make_curvature(folder, layers))


def make_large(folder: Path, layers: int, times: float) -> None:
    """A base and a tuned model with at least ``times`` the parameters of ``layers`` layers, and a link to it."""
    import math

    from .checkpoints import llama_config, llama_shapes, make_models

    def parameters(count: int) -> int:
        return sum(math.prod(shape) for shape in llama_shapes(llama_config(count)).values())

    more = layers
    while parameters(more) < times * parameters(layers):
        more += 1
    make_models(folder, more, tuned=1)
    if not (folder / "tuned-2").exists():
        (folder / "tuned-2").symlink_to("tuned-1")


def apart(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function in a process of its own, which takes its memory with it when it ends."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        pool.submit(function, *arguments).result()
    os.sync()


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def size(folders: Iterable[Path]) -> int:
    return sum(path.stat().st_size for folder in folders for path in weights(folder))


def header(path: Path) -> int:
    """Bytes before the first tensor of a safetensors file."""
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def compiled() -> None:
    """Leave gradmerge's bytecode beside its sources, as pip does; other programs that are timed have theirs."""
    spec = find_spec("gradmerge")
    assert spec is not None and spec.origin is not None
    compileall.compile_dir(Path(spec.origin).parent, quiet=1)


def warm(folders: Iterable[Path]) -> None:
    """Read files once, so that the program which happens to come first does not pay for the disk."""
    buffer = memoryview(bytearray(1 << 20))
    for folder in folders:
        for path in weights(folder):
            with path.open("rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass


def timed(program: str, command: list[str], out: Path) -> tuple[float, int, int, str]:
    """Run a command that writes a folder anew: seconds, peak of memory in bytes, disk blocks read, what it printed."""
    shutil.rmtree(out, ignore_errors=True)
    os.sync()
    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        begun = time.perf_counter()
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=environment)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - begun
        process.returncode = os.waitstatus_to_exitcode(status)
        stdout.seek(0)
        stderr.seek(0)
        output, errors = stdout.read().decode(), stderr.read().decode()
    if process.returncode != 0:
        raise RunFailed(f"{program} ended with status {process.returncode}: {errors[-2000:].strip()}")
    return wall, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024), usage.ru_inblock, output


class Benchmark:
    """The cases, and what they measured."""

    def __init__(self, data: Path, mergekit: Path | None, layers: int, repeats: int) -> None:
        self.data = data.absolute()
        self.mergekit = mergekit.absolute() if mergekit else None
        self.layers, self.repeats = layers, repeats
        self.measurements: list[Measurement] = []
        self.rows: list[Row] = []
        self.failures: list[str] = []
        self.models = self.data / f"llama-{layers}-layers"
        self.base, *self.tuned = (self.models / name for name in ("base", "tuned-1", "tuned-2"))
        self.curvature = [self.models / f"curvature-{number}" for number in range(3)]

    def prepare(self) -> None:
        compiled()
        say("making the models, unless they are there")
        self.data.mkdir(parents=True, exist_ok=True)
        apart(make_small, self.models, self.layers)

    def run(self, case: str) -> None:
        try:
            {
                COPY: self.copy,
                "average": self.average,
                "task-arithmetic": self.task_arithmetic,
                "ties": self.ties,
                "gradient-matching": self.gradient_matching,
                "large": self.large,
            }[case]()
        except (RunFailed, OSError) as error:
            self.failures.append(f"{case}: {error}")
            say(f"FAILED: {case}: {error}")

    # The cases.

    def copy(self) -> None:
        """What the disk and the page cache allow: one model, copied."""
        warm([self.base])
        script = "import shutil, sys; shutil.copytree(sys.argv[1], sys.argv[2])"
        for _ in range(self.repeats):
            self._measure(COPY, "plain copy", [sys.executable, "-c", script, str(self.base)], self.base)
        for measurement in self._of(COPY, "plain copy"):
            measurement.moved_bytes = 2 * size([self.base])
        self.rows.append(self._row(COPY, "plain copy"))

    def average(self) -> None:
        config = {"merge_method": "linear", "models": [self._entry(m, weight=1.0) for m in self.tuned]}
        self._against_mergekit("average", ["--method", "average", *self._ours(self.tuned)], config)

    def task_arithmetic(self) -> None:
        config = {
            "merge_method": "task_arithmetic",
            "base_model": str(self.base),
            "models": [self._entry(m, weight=1.0) for m in self.tuned],
        }
        self._against_mergekit("task-arithmetic", self._task_arithmetic(self.models), config)

    def ties(self) -> None:
        """mergekit takes minutes for this, so it runs once, at its best setting."""
        config = {
            "merge_method": "ties",
            "base_model": str(self.base),
            "models": [self._entry(m, weight=1.0, density=0.5) for m in self.tuned],
        }
        arguments = ["--method", "ties", "--base", str(self.base), *self._ours(self.tuned), "--set", "density=0.5"]
        self._against_mergekit("ties", arguments, config, their_runs=1, default_too=False)

    def gradient_matching(self) -> None:
        """Against our own task arithmetic, measured next to it."""
        say("making curvature files, unless they are there")
        apart(make_curvatures, self.models, self.layers)
        warm([self.base, *self.tuned, *self.curvature])
        arguments = ["--method", "gradient-matching", "--base", str(self.base), *self._ours(self.tuned)]
        for path in self.curvature:
            arguments += ["--curvature", str(path)]
        case, beside = "gradient-matching", "task-arithmetic, beside it"
        for _ in range(self.repeats):
            self._measure_ours(beside, self._task_arithmetic(self.models), self.base)
            self._measure_ours(case, arguments, self.base)
        plain, row = self._row(beside, OURS), self._row(case, OURS)
        cost = row.wall_s / plain.wall_s
        row.ratio = f"{cost:.2f} × task arithmetic's time"
        row.bars = [
            Bar.at_most("time over task arithmetic's", cost, MATCHING_COST),
            Bar.at_most("peak RSS, GiB", row.peak_rss_gib, RSS_WITH_CURVATURE),
        ]
        self.rows += [plain, row]

    def large(self) -> None:
        """Peak memory of a model four times as large; the small one is measured here if it was not before."""
        small = self._of("task-arithmetic", OURS)
        if not small:
            warm([self.base, *self.tuned])
            self._measure_ours("task-arithmetic", self._task_arithmetic(self.models), self.base)
            self.rows.append(self._row("task-arithmetic", OURS))
            small = self._of("task-arithmetic", OURS)
        folder = self.data / f"llama-{self.layers}-layers-times-4"
        say("making a model four times as large")
        try:
            apart(make_large, folder, self.layers, 4.0)
            case = "task-arithmetic, 4 × the parameters"
            self._measure_ours(case, self._task_arithmetic(folder), folder / "base")
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        row = self._row(case, OURS)
        growth = row.peak_rss_gib * GIB / max(m.peak_rss_bytes for m in small)
        row.ratio = f"{growth:.2f} × the small model's RSS"
        row.bars = [
            Bar.at_most("RSS over the small model's", growth, RSS_GROWTH),
            Bar.at_most("peak RSS, GiB", row.peak_rss_gib, RSS_DATA_FREE),
        ]
        self.rows.append(row)

    # What the cases are made of.

    @staticmethod
    def _ours(models: Sequence[Path]) -> list[str]:
        return [word for model in models for word in ("--model", str(model))]

    def _task_arithmetic(self, folder: Path) -> list[str]:
        tuned = [folder / "tuned-1", folder / "tuned-2"]
        return ["--method", "task-arithmetic", "--base", str(folder / "base"), *self._ours(tuned)]

    @staticmethod
    def _entry(model: Path, **parameters: float) -> dict[str, Any]:
        return {"model": str(model), "parameters": parameters}

    def _against_mergekit(
        self,
        case: str,
        arguments: list[str],
        config: dict[str, Any],
        *,
        their_runs: int | None = None,
        default_too: bool = True,
    ) -> None:
        """Both programs in turn; our time is compared with the better of mergekit's settings."""
        warm([self.base, *self.tuned])
        settings = [(THEIR_BEST, BEST_FLAGS), *([(THEIRS, ())] if default_too else [])] if self.mergekit else []
        for number in range(self.repeats):
            self._measure_ours(case, arguments, self.base)
            if their_runs is None or number < their_runs:
                for program, flags in settings:
                    self._measure_mergekit(case, program, config, flags)
        row = self._row(case, OURS)
        theirs = [self._row(case, program) for program, _ in settings]
        row.bars = [Bar.at_most("peak RSS, GiB", row.peak_rss_gib, RSS_DATA_FREE)]
        if theirs:
            faster = min(r.wall_s for r in theirs) / row.wall_s
            row.ratio = f"{faster:.1f} × faster than mergekit's best"
            row.bars.insert(0, Bar.at_least("mergekit's best time over ours", faster, FASTER[case]))
        self.rows += [row, *theirs]

    def _measure_ours(self, case: str, arguments: list[str], like: Path) -> None:
        command = [sys.executable, "-m", "gradmerge", "merge", *arguments, "--json", "--out"]
        measurement, output = self._measure(case, OURS, command, like)
        facts = json.loads(output)
        measurement.moved_bytes = facts["bytes_read"] + facts["bytes_written"]

    def _measure_mergekit(self, case: str, program: str, config: dict[str, Any], flags: Sequence[str]) -> None:
        file = self.data / f"mergekit-{case}.json"  # JSON is YAML
        file.write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2))
        command = [str(self.mergekit), *flags, "--no-copy-tokenizer", "--quiet", str(file)]
        self._measure(case, program, command, self.base)

    def _measure(self, case: str, program: str, command: list[str], like: Path) -> tuple[Measurement, str]:
        """Run a command that takes the output folder as its last word, and remove what it wrote."""
        out = self.data / "out"
        command = [*command, str(out)]
        try:
            wall, peak, blocks, output = timed(program, command, out)
            self._check_output(program, out, like)
        finally:
            shutil.rmtree(out, ignore_errors=True)
        measurement = Measurement(case, program, self._shown(command), wall, peak, blocks * 512)
        self.measurements.append(measurement)
        say(f"{case}: {program}: {wall:.1f} s, {peak / GIB:.2f} GiB")
        return measurement, output

    def _check_output(self, program: str, out: Path, like: Path) -> None:
        """All weights must be there: as many bytes as the base has, up to headers."""
        found, expected = size([out]), size([like])
        if abs(found - expected) > 0.01 * expected:
            raise RunFailed(f"{program} wrote {found} bytes of weights where {expected} were expected")

    def _shown(self, command: list[str]) -> list[str]:
        """The command without where things are on this machine."""
        tools = {sys.executable: "python", str(self.mergekit): "mergekit-yaml"}
        return [tools.get(word, word.replace(str(self.data), "DATA")) for word in command]

    def _of(self, case: str, program: str) -> list[Measurement]:
        return [m for m in self.measurements if (m.case, m.program) == (case, program)]

    def _row(self, case: str, program: str) -> Row:
        """Median time and highest peak of the runs."""
        runs = self._of(case, program)
        wall = statistics.median(m.wall_s for m in runs)
        row = Row(case, program, len(runs), wall, max(m.peak_rss_bytes for m in runs) / GIB)
        if runs[0].moved_bytes is not None:
            row.moved_gb_s = runs[0].moved_bytes / wall / 1e9
        return row

    # What comes out.

    def report(self) -> dict[str, Any]:
        copy = next((r.moved_gb_s for r in self.rows if r.case == COPY), None)
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": {
                "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
                "system": f"{platform.system()} {platform.machine()}",
            },
            "versions": {
                "python": platform.python_version(),
                "torch": version("torch"),
                "gradmerge": version("gradmerge"),
                "mergekit": mergekit_versions(self.mergekit),
            },
            "settings": {
                "layers": self.layers,
                "repeats": self.repeats,
                "parameters": sum(path.stat().st_size - header(path) for path in weights(self.base)) // 2,
                "model_bytes": size([self.base]),
            },
            "copy_gb_s": copy,
            "rows": [asdict(row) for row in self.rows],
            "measurements": [asdict(m) for m in self.measurements],
            "failures": self.failures,
        }


def mergekit_versions(script: Path | None) -> dict[str, str] | None:
    """Versions of mergekit and of its torch, from the environment that its script belongs to."""
    if script is None:
        return None
    code = (
        "import json; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in ('mergekit', 'torch')}))"
    )
    try:
        found = subprocess.run(
            [script.parent / "python", "-c", code], capture_output=True, text=True, check=True, timeout=60
        )
        result: dict[str, str] = json.loads(found.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return result


def table(report: dict[str, Any]) -> str:
    """The rows as text, with every bar and whether it was met."""
    copy = report["copy_gb_s"]
    lines = [("case", "program", "runs", "wall s", "peak RSS GiB", "moved GB/s", "ratio", "bars")]
    for row in report["rows"]:
        moved = row["moved_gb_s"]
        share = f" ({100 * moved / copy:.0f} % of a copy)" if moved and copy and row["case"] != COPY else ""
        lines.append(
            (
                row["case"],
                row["program"],
                str(row["runs"]),
                f"{row['wall_s']:.2f}",
                f"{row['peak_rss_gib']:.2f}",
                f"{moved:.2f}{share}" if moved else "",
                row["ratio"],
                "; ".join(bar_text(bar) for bar in row["bars"]),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    numbers = {2, 3, 4}
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in numbers else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def bar_text(bar: dict[str, Any]) -> str:
    return f"{bar['name']} {bar['value']:.2f}, bar {bar['sense']} {bar['bar']:g}: {'pass' if bar['passed'] else 'FAIL'}"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed and memory of merging on disk, gradmerge against mergekit.")
    parser.add_argument("--data", type=Path, required=True, help="folder for models and outputs")
    parser.add_argument(
        "--mergekit", type=Path, help="mergekit-yaml of an environment of its own; without it, ours alone is measured"
    )
    parser.add_argument("--json", type=Path, help="where to write the measurements (default: DATA/merge.json)")
    parser.add_argument("--layers", type=int, default=22, help="layers of the model; 22 are 1.1 B parameters")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each command (mergekit's TIES runs once)")
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    parser.add_argument("--skip-large", action="store_true", help="leave out the model four times as large")
    parser.add_argument("--keep-curvature", action="store_true", help="do not remove the curvature files afterwards")
    options = parser.parse_args()
    cases = [case for case in options.cases.split(",") if not (options.skip_large and case == "large")]
    unknown = [case for case in cases if case not in CASES]
    if unknown or options.repeats < 1 or options.layers < 1:
        parser.error(f"unknown case {unknown[0]!r}" if unknown else "--repeats and --layers are at least 1")
    if options.mergekit and not options.mergekit.is_file():
        parser.error(f"{options.mergekit}: no such file")

    benchmark = Benchmark(options.data, options.mergekit, options.layers, options.repeats)
    benchmark.prepare()
    try:
        for case in (COPY, *cases):
            benchmark.run(case)
            if case == "gradient-matching" and not options.keep_curvature:
                for folder in benchmark.curvature:
                    shutil.rmtree(folder, ignore_errors=True)
    finally:
        report = benchmark.report()
        path = options.json or options.data / "merge.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(table(report))
    for failure in benchmark.failures:
        print(f"FAILED: {failure}")
    return 1 if benchmark.failures else 0


if __name__ == "__main__":
    sys.exit(main())
