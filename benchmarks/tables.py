"""The measurements kept in `results/`, as Markdown for the documentation.

`python -m docs.pages` (`make pages`) writes them into the pages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *(line(row) for row in rows)])


def benchmark_results() -> str:
    """The table of the last benchmark that was kept, if there is one."""
    path = RESULTS / "merge.json"
    if not path.is_file():
        return "No results are kept in this version; `make bench` measures them on your machine."
    report = json.loads(path.read_text("utf-8"))
    machine, versions, settings = report["machine"], report["versions"], report["settings"]
    peer = versions["mergekit"] or {}
    copy = report["copy_gb_s"]
    rows = []
    for row in report["rows"]:
        moved = row["moved_gb_s"]
        share = f" ({100 * moved / copy:.0f} %)" if moved and copy and row["case"] != "copy" else ""
        rows.append(
            (
                row["case"],
                row["program"],
                str(row["runs"]),
                f"{row['wall_s']:.1f}",
                f"{row['peak_rss_gib']:.2f}",
                f"{moved:.2f}{share}" if moved else "",
                row["ratio"],
            )
        )
    header = ("case", "program", "runs", "wall s", "peak RSS GiB", "moved GB/s (of a copy)", "ratio")
    return (
        f"Measured {report['created'][:10]} on {machine['cores']} cores and {machine['memory_bytes'] / 2**30:.0f} GiB "
        f"({machine['system']}), files in the page cache where they fit: Llama checkpoints of "
        f"{settings['parameters'] / 1e9:.2f} B parameters in bfloat16, {settings['model_bytes'] / 1e9:.1f} GB each. "
        f"gradmerge {versions['gradmerge']} with torch {versions['torch']}, "
        f"mergekit {peer.get('mergekit', '(not run)')} with torch {peer.get('torch', '(not run)')}, "
        f"Python {versions['python']}. "
        "Times are medians and include starting the program; memory is the highest peak.\n\n" + table(header, rows)
    )


#: What a row of a curvature benchmark is called.
WAYS = {
    "plain": "plain forward and backward pass",
    "ours": "**gradmerge**",
    "kronecker": "**gradmerge**, Kronecker factors",
    "loop": "loop, one example per pass",
    "vmap": "torch.func.vmap",
    "opacus": "Opacus",
    "backpack": "BackPACK",
}


def curvature_results() -> str:
    """Every `python -m benchmarks.curvature` that was kept: one table each."""
    paths = sorted(RESULTS.glob("curvature-*.json"))
    if not paths:
        return "No results are kept in this version; `make bench-curvature` measures them on your machine."
    return "\n\n".join(one_curvature_result(path) for path in paths)


def one_curvature_result(path: Path) -> str:
    report = json.loads(path.read_text("utf-8"))
    machine, versions, settings = report["machine"], report["versions"], report["settings"]
    where = machine["gpu"] or f"{machine['threads']} threads of an {machine['cpu']}"
    peers = [f"{WAYS[name]} {versions[package]}" for name, package in PEERS.items() if versions.get(package)]
    text = (
        f"**{settings['model']}**, {settings['parameters'] / 1e6:,.1f} M parameters with random values in "
        f"{settings['dtype']}, {settings['layers']} layers, batches of {settings['batch_size']} × {settings['tokens']} "
        f"tokens, on {where}; {report['created'][:10]}, torch {versions['torch']}, transformers "
        f"{versions['transformers']}{''.join(f', {peer}' for peer in peers)} (`benchmarks/results/{path.name}`):"
    )
    rows = [way_row(WAYS.get(name, name), result) for name, result in report["methods"].items()]
    header = ("way", "s per batch", "× plain pass", "examples/s", "largest error", "remarks")
    memory = report["memory"]
    peak = ""
    if memory:
        sizes = [f"{memory[key] / 2**30:.2f} GiB" for key in ("plain_peak_bytes", "ours_peak_bytes")]
        peak = (
            f"\n\nPeak GPU memory, weights included: plain pass {sizes[0]}, gradmerge {sizes[1]}; "
            f"the sums themselves are {memory['float32_parameter_bytes'] / 2**30:.2f} GiB of that."
        )
    return f"{text}\n\n{table(header, rows)}{peak}"


#: Who else measures, and the package that it comes from.
PEERS = {"opacus": "opacus", "backpack": "backpack-for-pytorch"}


def way_row(name: str, result: dict[str, Any]) -> tuple[str, ...]:
    def number(key: str, form: str) -> str:
        return "" if result[key] is None else format(result[key], form)

    remarks = [result["setting"]]
    if result["missing_parameters"]:
        remarks.append(f"{result['missing_parameters']} parameters missing: a time for less work")
    if (wrong := (result["wrong_parameters"] or 0) - (result["missing_parameters"] or 0)) > 0:
        remarks.append(f"{wrong} parameters wrong")
    if result["examples_timed"]:
        remarks.append(f"time of {result['examples_timed']} examples, scaled up")
    if result["seconds_per_batch"] is None:
        remarks.append(result["note"])
    return (
        name,
        number("seconds_per_batch", ".3g"),
        number("ratio_to_plain", ".2f"),
        number("examples_per_second", ",.0f"),
        "0" if result["error"] == 0 else number("error", ".1e"),
        "; ".join(remark for remark in remarks if remark),
    )


def precision_results() -> str:
    """Accuracy of merges per precision of curvature, from the last `python -m benchmarks.precision` that was kept."""
    report = json.loads((RESULTS / "precision.json").read_text("utf-8"))
    settings, sizes = report["settings"], report["curvature_bytes_of_a_model"]
    names = [*settings["tasks"], "mean"]
    rows = []
    for model, accuracy in report["accuracy"].items():
        label = f"**merged, {model}**" if model in sizes else model
        rows.append((label, *(f"{100 * accuracy[name]:.2f}" for name in names)))
    bytes_of = [(precision, f"{size:,}", f"{size / sizes['float32']:.2f}") for precision, size in sizes.items()]
    changes = {p: 100 * change for p, change in report["largest_change"].items() if p != "float32"}
    worst = ", ".join(f"{p} {change:.2f} points" for p, change in changes.items())
    machine = report["machine"]
    return (
        table(("accuracy, %", *(name.replace("_", " ") for name in names)), rows)
        + "\n\n"
        + table(("precision", "bytes of one model's curvature", "of float32"), bytes_of)
        + f"\n\nLargest change of an accuracy against float32: {worst}. Measured on an {machine['device']} with torch "
        f"{machine['torch']}, {settings['epochs']} epochs of fine-tuning, "
        f"at most {settings['limit']:,} rows of each set, seed {settings['seed']} "
        f"(`benchmarks/results/precision.json`); {report['note']}."
    )


def ranking_results() -> str:
    """How well predictions ranked merges, from the last `python -m benchmarks.ranking` that was kept."""
    report = json.loads((RESULTS / "ranking.json").read_text("utf-8"))
    settings = report["settings"]
    rows = [(task, f"{v['loss']:.2f}", f"{v['error']:.2f}") for task, v in report["spearman"].items()]
    weights = [
        (method, *(f"{picked[how]:g}" for how in ("by accuracy", "by worst predicted", "by summed prediction")))
        for method, picked in report["best_weight"].items()
        if len({row["weight"] for row in report["rows"] if row["method"] == method}) > 1
    ]
    return (
        f"`python -m benchmarks.ranking` fine-tunes {settings['encoder']} on {settings['tasks'][0]} and from there on "
        f"{', '.join(settings['tasks'][1:])} (at most {settings['limit']:,} rows each, one seed), "
        f"and holds the predictions for {report['merges']} merges of five methods against test data. Spearman's ρ:\n\n"
        + table(("task", "predicted and true loss", "predicted loss and true error"), rows)
        + "\n\nThe weight (of TIES: the scale) that each picks from "
        + ", ".join(f"{w:g}" for w in sorted({row["weight"] for row in report["rows"]}))
        + ":\n\n"
        + table(("method", "by mean accuracy", "by the worst prediction", "by the sum of predictions"), weights)
    )


def same_work_results() -> str:
    """mergekit's recipes by both programs, from the runs of `python -m benchmarks.same_work` that were kept."""
    parts = []
    for path in sorted(RESULTS.glob("same_work*.json")):
        report = json.loads(path.read_text("utf-8"))
        rows = []
        for row in report["rows"]:
            ours, theirs = (f"{row['wall_s'][program]:.1f}" for program in ("gradmerge", "mergekit"))
            agree = f"{100 * row['agreement']:.3f} %" + (" (in distribution)" if row["random"] else "")
            peaks = (f"{row['peak_rss_gib'][program]:.2f}" for program in ("gradmerge", "mergekit"))
            rows.append((row["method"], ours, theirs, f"{row['times_as_fast']:.1f}", *peaks, agree))
        header = ("mergekit's method", "gradmerge s", "mergekit s", "times as fast", "GiB", "GiB, mergekit", "agree")
        runs = ", ".join(sorted({str(row["runs"]) for row in report["rows"]}))
        about = (
            f"{report['parameters'] / 1e9:.2f} B parameters in bfloat16, {report['cores']} cores, "
            f"{report['created'][:10]}, mergekit {report['versions']['mergekit']['mergekit']} with "
            f"`--out-shard-size 500M`, runs of each: {runs}:"
        )
        parts.append(about + "\n\n" + table(header, rows))
    return "\n\n".join(parts)


def engine_results() -> str:
    """Merges on Ray beside local ones, from the last `python -m benchmarks.engines` that was kept."""
    report = json.loads((RESULTS / "engines.json").read_text("utf-8"))
    rows = []
    for method, found in report["methods"].items():
        for name, row in found["medians"].items():
            over = f"{row['over_local_beyond_start']:.2f}" if "over_local_beyond_start" in row else "1"
            seconds = (f"{row[key]:.1f}" for key in ("wall_s", "start_s", "merging_s"))
            rows.append((method, name, *seconds, over))
    header = ("method", "engine", "seconds in all", "of which Ray's start", "merging", "times local, beyond the start")
    size = report["bytes_of_a_model"] / 1e9
    about = (
        f"\n\nThree models of {size:.1f} GB each on one machine with {report['machine']['cores']} cores, warm files, "
        f"Ray {report['versions']['ray']} (`python -m benchmarks.engines`, medians)."
    )
    return table(header, rows) + about


def scale_results() -> str:
    """Merges and calibration against the depth of the model, from the last `python -m benchmarks.scale`."""
    report = json.loads((RESULTS / "scale.json").read_text("utf-8"))
    rows = [
        (
            run["step"],
            f"{run['parameters'] / 1e9:.2f} B, {run['layers']} layers",
            f"{run['cpu_s']:.0f}",
            f"{run['peak_rss_bytes'] / 2**30:.2f}",
            f"{2 * run['model_bytes'] / 2**30:.2f}",
        )
        for run in sorted(report["runs"], key=lambda run: (run["step"], run["layers"]))
    ]
    header = ("step", "model", "CPU seconds", "peak memory, GiB", "one model in float32, GiB")
    return table(header, rows)


#: What a page may ask for, by the name that it uses.
TABLES: dict[str, Callable[[], str]] = {
    "benchmark": benchmark_results,
    "curvature-benchmark": curvature_results,
    "engines": engine_results,
    "precision": precision_results,
    "ranking": ranking_results,
    "same-work": same_work_results,
    "scale": scale_results,
}
