"""What the pages take from the program itself when the site is built, so that they cannot fall behind it.

A line `<!-- generated: NAME -->` in a page is replaced by what the function for NAME returns. Recipes that a page shows
are checked: one that the program would refuse stops the build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import typer
from mkdocs.exceptions import PluginError
from pydantic import BaseModel

from gradmerge.cli.app import app
from gradmerge.errors import InputError
from gradmerge.recipe import Base, Identity, Model, Output, Recipe, make_recipe, parse_yaml
from gradmerge.rules import RULES, Rule
from gradmerge.tasks import MEANINGS, columns

RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    for block in re.findall(r"^```yaml[^\n]*\n(.*?)^```", markdown, re.DOTALL | re.MULTILINE):
        if re.search(r"^method:", block, re.MULTILINE):
            try:
                make_recipe(parse_yaml(block, "recipe"))
            except InputError as error:
                raise PluginError(f"{page.file.src_uri} shows a recipe that is not valid: {error}") from error

    def generated(match: re.Match[str]) -> str:
        return GENERATED[match[1]]()

    return re.sub(r"^<!-- generated: ([a-z-]+) -->$", generated, markdown, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Docstrings may say :class:`Name`; the page shows the name alone."""
    return re.sub(r":(?:class|meth|func|data|attr):(?=<code>)", "", html)


def table(header: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    def line(cells: tuple[str, ...]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *(line(row) for row in rows)])


# Recipe.


def recipe_reference() -> str:
    """Every key of a recipe, from the schema that checks it."""
    sections: list[tuple[str, str, type[BaseModel]]] = [
        ("The top level", "", Recipe),
        ("`base`", "", Base),
        ("`models[…]`", "", Model),
        ("Curvature", "Wherever a recipe names curvature, this may stand instead of a path.", Identity),
        ("`output`", "", Output),
    ]
    parts = []
    for title, text, model in sections:
        about = text or (model.__doc__ or "").strip()
        parts.append(f"## {title}\n\n{about}\n\n{fields_table(model)}")
    return "\n\n".join(parts)


def fields_table(model: type[BaseModel]) -> str:
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema["properties"].items():
        default = "required" if name in required else default_text(field.get("default"), model, name)
        rows.append((f"`{name}`", kind(field), default, model.model_fields[name].description or ""))
    return table(("key", "value", "default", "meaning"), rows)


def kind(field: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return {"Identity": "`{identity: c}`", "Base": "mapping or path", "Model": "mapping or path"}.get(
            name, "mapping"
        )
    if "enum" in field:
        return " | ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        words = [kind(part) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    if field.get("type") == "array":
        return f"list of {kind(field['items'])}"
    word = {"string": "text", "number": "number", "integer": "size", "boolean": "`true` | `false`", "object": "mapping"}
    return word[field["type"]] + (f", at least {field['minimum']:g}" if "minimum" in field else "")


def default_text(value: Any, model: type[BaseModel], name: str) -> str:
    if model.model_fields[name].default_factory is not None:
        return "all defaults"
    if value is None:
        return "none"
    if name == "shard_size":
        return f"`{value / 1e9:g}GB`"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


# Methods.


def methods_table() -> str:
    """The rules as rows of one equation."""
    rows = [(f"[`{r.name}`](methods.md#{r.name})", *r.row) for r in RULES.values()]
    return table(("method", "α_t", "H_0", "H_t"), rows)


def methods_reference() -> str:
    return methods_table() + "\n\n" + "\n\n".join(method(rule) for rule in RULES.values())


def method(rule: Rule) -> str:
    formula, _, text = rule.explanation.partition("\n")
    weights = "" if "weights" in rule.inputs else " Weights have no meaning here and are refused."
    own = "`output.curvature: true` writes H̄ beside the result." if rule.precision else ""
    options = ""
    if rule.options:
        rows = [
            (
                f"`{o.name}`",
                o.kind,
                "required" if o.required else f"`{json.dumps(o.default).strip(chr(34))}`",
                o.help.text,
            )
            for o in rule.options
        ]
        options = "\n\n" + table(("option", "value", "default", "meaning"), rows)
    return f"""## {rule.name}

**{formula}**

{text.strip()}

Needs: {rule.needs_in_words}.{weights} {own}

Reference: {rule.reference}.{options}"""


# Command line.


def cli_reference() -> str:
    """The help of every command, as the program prints it."""
    parts = []
    for context in contexts(typer.main.get_command(app), "gradmerge"):
        parts.append(f"## {context.command_path}\n\n```text\n{context.get_help().rstrip()}\n```")
    return "\n\n".join(parts)


def contexts(command: Any, name: str, parent: Any = None) -> Iterator[Any]:
    """A command and those below it, each as it would be called, on a terminal of 80 columns."""
    settings = command.context_settings | {"terminal_width": 80, "max_content_width": 80}
    context = command.context_class(command, info_name=name, parent=parent, **settings)
    yield context
    for child_name, child in getattr(command, "commands", {}).items():
        yield from contexts(child, child_name, context)


# Benchmarks.


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
                "; ".join(bar_text(bar) for bar in row["bars"]),
            )
        )
    header = ("case", "program", "runs", "wall s", "peak RSS GiB", "moved GB/s (of a copy)", "ratio", "bars")
    return (
        f"Measured {report['created'][:10]} on {machine['cores']} cores and {machine['memory_bytes'] / 2**30:.0f} GiB "
        f"({machine['system']}), files in the page cache where they fit: Llama checkpoints of "
        f"{settings['parameters'] / 1e9:.2f} B parameters in bfloat16, {settings['model_bytes'] / 1e9:.1f} GB each. "
        f"gradmerge {versions['gradmerge']} with torch {versions['torch']}, mergekit {peer.get('mergekit', '(not run)')} "
        f"with torch {peer.get('torch', '(not run)')}, Python {versions['python']}. "
        "Times are medians and include starting the program; memory is the highest peak.\n\n" + table(header, rows)
    )


def device_results() -> str:
    """CPU against GPU, and threads, from the last `python -m benchmarks.devices` that was kept."""
    report = json.loads((RESULTS / "devices.json").read_text("utf-8"))
    rules = [
        (r["method"], f"{r['cpu_s']:.1f}", f"{r['device_s']:.1f}", "yes" if r["same_bytes"] else "no")
        for r in report["rules"]
    ]
    counts = sorted({t["threads"] for t in report["threads"]})
    seconds = {(t["method"], t["threads"]): f"{t['seconds']:.1f}" for t in report["threads"]}
    methods = list(dict.fromkeys(t["method"] for t in report["threads"]))
    threads = [(method, *(seconds[method, count] for count in counts)) for method in methods]
    return (
        f"`python -m benchmarks.devices --data DIR` on {report['cores']} cores and an {report['device']}, seconds for "
        f"{report['layers']} layers (as in the table below, but fewer) on 4 threads:\n\n"
        + table(("rule", "cpu s", "cuda s", "same bytes"), rules)
        + f"\n\nand for {report['thread_layers']} layers by number of threads, on the CPU:\n\n"
        + table(("rule", *(f"{count} thread{'s' if count > 1 else ''}, s" for count in counts)), threads)
    )


#: What a row of a curvature benchmark is called.
WAYS = {
    "plain": "plain forward and backward pass",
    "ours": "**gradmerge**",
    "loop": "loop, one example a pass",
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
            f"\n\nPeak GPU memory, weights included: plain pass {sizes[0]}, gradmerge {sizes[1]}; the sums themselves are "
            f"{memory['float32_parameter_bytes'] / 2**30:.2f} GiB of that."
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
    """Accuracy of merges with curvature in each precision, from the last `python -m benchmarks.precision` that was kept."""
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
        f"{machine['torch']}, {settings['epochs']} epochs of fine-tuning, at most {settings['limit']:,} rows of each set, "
        f"seed {settings['seed']} (`benchmarks/results/precision.json`); {report['note']}."
    )


# Data.


def usual_columns() -> str:
    """The names that a column is recognised by, from the lists that the program looks through."""

    def names(words: Sequence[str]) -> str:
        return ", ".join(f"`{word}`" for word in words)

    rows = [
        ("`classify`", "`text`", names(columns.TEXT) + "; or else the only column with text"),
        ("", "`text`, `text2`", ", ".join(f"`{a}` + `{b}`" for a, b in columns.PAIRS)),
        ("", "`label`", names(columns.LABEL)),
        ("`causal-lm`", "`messages`", "`messages`"),
        ("", "`text`", "`text`; if there is neither this nor a prompt with its completion, as for `classify`"),
        ("", "`prompt`", names(columns.PROMPT)),
        ("", "`completion`", names(columns.COMPLETION)),
        ("`seq2seq`", "`source`", names(columns.SOURCE) + "; or else the only column with text"),
        ("", "`target`", names(columns.TARGET)),
        ("`image`", "`image`", names(columns.IMAGE)),
        ("", "`label`", "`label`, `labels`, `fine_label`; or else as for `classify`"),
    ]
    return table(("task", "key", "names that are recognised, the first that is there"), rows)


def metrics_reference() -> str:
    """What each number of `gradmerge evaluate` is, in the program's own words."""
    return table(("metric", "meaning"), [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()])


def bar_text(bar: dict[str, Any]) -> str:
    return f"{bar['name']} {bar['sense']} {bar['bar']:g}: {'met' if bar['passed'] else '**missed**'}"


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
        f"{', '.join(settings['tasks'][1:])} (at most {settings['limit']:,} rows each, one seed), and holds the predictions for "
        f"{report['merges']} merges of five methods against test data. Spearman's ρ:\n\n"
        + table(("task", "predicted and true loss", "predicted loss and true error"), rows)
        + "\n\nThe weight (of TIES: the scale) that each picks from "
        + ", ".join(f"{w:g}" for w in sorted({row["weight"] for row in report["rows"]}))
        + ":\n\n"
        + table(("method", "by mean accuracy", "by the worst prediction", "by the sum of predictions"), weights)
    )


def diagnose_results() -> str:
    """What diagnosing costs beside merging, from the last `python -m benchmarks.diagnose` that was kept."""
    report = json.loads((RESULTS / "diagnose.json").read_text("utf-8"))
    median = report["median_s"]
    return (
        f"`gradmerge diagnose` on a recipe of {report['tasks']} tasks and models of 1.1 B parameters took "
        f"{median['diagnose']:.1f} s, {report['ratio']:.1f} times as long as merging it ({median['merge']:.1f} s; "
        "`python -m benchmarks.diagnose`, medians)."
    )


GENERATED = {
    "ranking": ranking_results,
    "diagnose": diagnose_results,
    "recipe": recipe_reference,
    "methods": methods_reference,
    "cli": cli_reference,
    "benchmark": benchmark_results,
    "devices": device_results,
    "curvature-benchmark": curvature_results,
    "precision": precision_results,
    "columns": usual_columns,
    "metrics": metrics_reference,
}
