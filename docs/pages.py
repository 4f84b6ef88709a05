"""The generated parts of the pages in docs/ and experiments/: `python -m docs.pages` (`make pages`) updates them.

Between the lines `<!-- generated: NAME -->` and `<!-- end of generated -->` of a page stands what the function for NAME
returns. It is committed with the page, so that the page can be read where it lies; a test fails when it has fallen
behind.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import typer
from benchmarks.tables import TABLES, table
from experiments.recovery.report import shares as recovery_shares
from pydantic import BaseModel

import gradmerge
from experiments import results_tables
from gradmerge.cli.app import app
from gradmerge.recipe import Base, Case, Identity, Model, Output, Recipe, Slice, SliceModel, TokenizerChoice
from gradmerge.recipe.mergekit import MERGEKIT_METHODS
from gradmerge.rules import METHODS, Rule
from gradmerge.rules.spec import INPUTS
from gradmerge.tasks import MEANINGS, TASK_MEANINGS, columns

DOCS = Path(__file__).parent
ROOT = DOCS.parent
EXPERIMENTS = ROOT / "experiments"
BENCHMARKS = ROOT / "benchmarks"
FOLDERS = (DOCS, EXPERIMENTS, BENCHMARKS)
BEGIN = re.compile(r"^<!-- generated: ([a-z0-9-]+) -->$", re.MULTILINE)
PART = re.compile(BEGIN.pattern + r"(.*?)^<!-- end of generated -->$", re.MULTILINE | re.DOTALL)


def main() -> None:
    for page in pages():
        before = page.read_text("utf-8")
        if (after := filled(before)) != before:
            page.write_text(after, "utf-8")
            print(f"{page.relative_to(ROOT)} is brought up to date")


def pages() -> list[Path]:
    """The pages with generated parts."""
    every = sorted([ROOT / "README.md", *(page for folder in FOLDERS for page in folder.rglob("*.md"))])
    return [page for page in every if BEGIN.search(page.read_text("utf-8"))]


def filled(page: str) -> str:
    """The text of a page with every generated part made anew."""
    parts = PART.findall(page)
    if [name for name, _ in parts] != BEGIN.findall(page):
        raise ValueError("A generated part of the page has no line <!-- end of generated -->.")
    return PART.sub(lambda part: generated(part[1]), page)


def generated(name: str) -> str:
    text = re.sub(r"[ \t]+$", "", GENERATED[name](), flags=re.MULTILINE)
    return f"<!-- generated: {name} -->\n\n{text}\n\n<!-- end of generated -->"


VARYING = """\
A `weight`, and every option that is a number, may differ between tensors. A list is spread evenly over the layers, from
the first to the last, with straight lines between its values; tensors outside the layers (embeddings, norms, heads)
take the first. Cases go by name: the first whose filter fits decides, and its value may be a list. Options that may
differ between models as well (`gradmerge methods NAME` says which) stand in a model's own `options`.

```yaml
method: ties
base: ./base
models:
  - model: ./chat
    weight: [0.3, 0.7, 0.5]        # 0.3 in the first layer, 0.7 in the middle, 0.5 in the last
    options: {density: 0.3}
  - model: ./code
    weight:
      - {filter: mlp, value: [0.2, 0.8]}     # a plain part of the name,
      - {filter: "*.q_proj.*", value: 0.5}   # or a glob
      - {value: 1.0}                         # the rest
options: {density: 0.6, scope: tensor}
```

The keys of a case:"""


def recipe_reference() -> str:
    """Every key of a recipe, from the schema that checks it."""
    sections: list[tuple[str, str, type[BaseModel]]] = [
        ("The top level", "", Recipe),
        ("`base`", "", Base),
        ("`models[…]`", "", Model),
        ("`slices[…]`", "", Slice),
        ("`slices[…].models[…]`", "The keys of a model, and:", SliceModel),
        ("Values that vary", VARYING, Case),
        ("Curvature", "Wherever a recipe names curvature, this may stand instead of a path.", Identity),
        ("`output`", "", Output),
        ("`tokenizer`", "", TokenizerChoice),
    ]
    parts = []
    for title, text, model in sections:
        about = text or (model.__doc__ or "").strip()
        without = Model.model_fields if model is SliceModel else ()
        parts.append(f"## {title}\n\n{about}\n\n{fields_table(model, without)}")
    return "\n\n".join(parts)


def fields_table(model: type[BaseModel], without: Container[str] = ()) -> str:
    schema = model.model_json_schema()
    required = set(schema.get("required", ()))
    rows = []
    for name, field in schema["properties"].items():
        if name in without:
            continue
        value = "number, list or cases" if name == "weight" else kind(field)
        default = "required" if name in required else default_text(field.get("default"), model, name)
        rows.append((f"`{name}`", value, default, model.model_fields[name].description or ""))
    return table(("key", "value", "default", "meaning"), rows)


def kind(field: dict[str, Any]) -> str:
    """A JSON schema in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        known = {"Identity": "`{identity: c}`", "MeanTimes": "`{mean_times: N}`", "TokenizerChoice": "text or mapping"}
        return (known | dict.fromkeys(("Base", "Model"), "mapping or path")).get(name, "mapping")
    if "type" not in field and "anyOf" not in field and "enum" not in field and "const" not in field:
        return "number or list"
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " | ".join(f"`{value}`" for value in field["enum"])
    if "anyOf" in field:
        words = [kind(part) for part in field["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(words))
    if "prefixItems" in field:
        return "two whole numbers"
    if field.get("type") == "array":
        return f"list of {kind(field['items'])}"
    word = {"string": "text", "number": "number", "integer": "size", "boolean": "`true` | `false`", "object": "mapping"}
    if "maximum" in field and field["type"] == "integer":
        return "whole number"
    return word[field["type"]] + (f", at least {field['minimum']:g}" if "minimum" in field else "")


def default_text(value: Any, model: type[BaseModel], name: str) -> str:
    if model.model_fields[name].default_factory is not None:
        return "all defaults"
    if value is None:
        return "none"
    if name == "shard_size":
        return f"`{value / 1e9:g}GB`"
    return f"`{json.dumps(value) if not isinstance(value, str) else value}`"


def methods_table() -> str:
    """The rules as rows of one equation."""
    rows = [(f"[`{r.name}`](methods.md#{r.name})", *r.matching_form) for r in METHODS.values()]
    return table(("method", "α_t", "H_0", "H_t"), rows)


def methods_reference() -> str:
    return methods_table() + "\n\n" + "\n\n".join(method(rule) for rule in METHODS.values())


def rule_inputs() -> str:
    """The inputs that a rule can take."""
    return table(("input", "value"), [(f"`{name}`", text) for name, text in INPUTS.items()])


def method(rule: Rule) -> str:
    formula, _, text = rule.explanation.partition("\n")
    weights = "" if "weights" in rule.inputs else " Weights have no meaning here and are refused."
    memory = f" Memory: {rule.memory_in_words}." if rule.memory_in_words else ""
    own = "`output.curvature: true` writes H̄ beside the result." if rule.precision else ""
    options = ""
    if rule.options:
        rows = [
            (
                f"`{o.name}`",
                o.kind,
                "required" if o.required else f"`{json.dumps(o.default).strip(chr(34))}`",
                o.meaning,
            )
            for o in rule.options
        ]
        options = "\n\n" + table(("option", "value", "default", "meaning"), rows)
    return f"""## {rule.name}

**{formula}**

{text.strip()}

Needs: {rule.needs_in_words}.{weights}{memory} {own}

Reference: {rule.reference}.{options}"""


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


def usual_columns() -> str:
    """The names that a column is recognized by, from the lists that the program looks through."""

    def names(words: Sequence[str]) -> str:
        return ", ".join(f"`{word}`" for word in words)

    rows = [
        ("`classify`", "`text`", names(columns.TEXT)),
        ("", "`text`, `text2`", ", ".join(f"`{a}` + `{b}`" for a, b in columns.PAIRS)),
        ("", "`label`", names(columns.LABEL)),
        ("`causal-lm`", "`messages`", "`messages`"),
        ("", "`text`", "`text`; if there is neither this nor a prompt with its completion, as for `classify`"),
        ("", "`prompt`", names(columns.PROMPT)),
        ("", "`completion`", names(columns.COMPLETION)),
        ("`seq2seq`", "`source`", names(columns.SOURCE)),
        ("", "`target`", names(columns.TARGET)),
        ("`image`", "`image`", names(columns.IMAGE)),
        ("", "`label`", "as for `classify`"),
        (
            "`embedding`",
            "`anchor`, `positive`",
            ", ".join(f"`{a}` + `{b}`" for a, b in columns.ANCHORS) + "; or a pair",
        ),
        ("", "`negative`", "all of " + names(columns.NEGATIVE)),
        ("", "`score`", names(columns.SCORE) + ", if there is no negative"),
    ]
    return table(("task", "key", "names that are recognized, the first that is there"), rows)


def metrics_reference() -> str:
    """What each number of `gradmerge evaluate` is, in the program's own words."""
    rows = [(f"`{name}`", meaning) for name, meaning in MEANINGS.items()]
    for task in ("embedding", "causal-lm"):
        rows += [(f"`{name}` of `{task}`", meaning) for name, meaning in TASK_MEANINGS[task].items()]
    return table(("metric", "meaning"), rows)


def python_names() -> str:
    """The functions and classes that `import gradmerge` gives, each with the first paragraph of its docstring."""
    found = [(name, getattr(gradmerge, name)) for name in gradmerge.__all__]
    rows = [
        (f"`gm.{name}`", (inspect.getdoc(value) or "").partition("\n\n")[0].replace("\n", " "))
        for name, value in found
        if inspect.isclass(value) or inspect.isfunction(value)
    ]
    return table(("name", "what it is"), rows)


def mergekit_methods() -> str:
    """mergekit's methods and parameters beside ours."""
    words = {"rescale": "rescale: norm", "nuslerp_flatten": "axis: all", "nuslerp_row_wise": "axis: first"}
    rows = []
    for name, method in MERGEKIT_METHODS.items():
        said = [(p.name, words.get(p.name, p.option)) for p in method.parameters]
        told = [f"`{theirs}`" if theirs == ours else f"`{theirs}` (`{ours}`)" for theirs, ours in said]
        says = ", ".join(f"`{key}: {value}`" for key, value in method.options.items())
        rows.append((f"`{name}`", f"[`{method.rule}`](reference/methods.md#{method.rule})", says, ", ".join(told)))
    return table(("mergekit", "here", "with the options", "parameters, and what they are called here"), rows)


#: Scripts that pages show whole, so that readers see what the tests run.
SCRIPTS = {
    "script-calibration": ROOT / "examples/calibration.py",
    "script-prior-trainer": ROOT / "examples/training/prior_trainer.py",
}


def script(path: Path) -> str:
    return f'```python title="{path.relative_to(ROOT).as_posix()}"\n{path.read_text("utf-8").rstrip()}\n```'


#: Rows of the table in README.md: title → the column of each step in the recovery experiment.
RECOVERY = {
    "SmolLM2-135M, five tasks (loss)": ("language-model-0", "calibrate", "calibrate --curvature none, distill"),
    "MPNet, five sentiment sets (accuracy)": ("sentiment-0", "calibrate", "calibrate --curvature none, distill"),
}


def main_results() -> str:
    """How much of joint training's gain merges keep, and what calibration and distillation add."""
    rows = []
    for title, (name, *steps) in RECOVERY.items():
        found = json.loads((EXPERIMENTS / f"results/recovery/{name}.json").read_text("utf-8"))
        kept = recovery_shares(found)
        rows.append((title, *(f"{kept[step][0]:.0f} %" for step in ("average", "gradient-matching", *steps))))
    merges = results_tables.merging_shares()
    demo = json.loads((BENCHMARKS / "results/calibration-demo-defaults.json").read_text("utf-8"))["accuracy_percent"]
    base, joint = (demo[name]["mean"] for name in ("base", "joint"))
    for title, shares in merges.items():
        average, matching = (
            fmean(point[0] for point in shares[method]) for method in ("average", "gradient matching, weight 1")
        )
        steps = ["–", "–"]
        if title.startswith("demo"):
            means = (demo[step]["mean"] for step in ("calibrate", "calibrate + distill"))
            steps = [f"{100 * (mean - base) / (joint - base):.0f} %" for mean in means]
        rows.append((f"{title} (accuracy)", f"{average:.0f} %", f"{matching:.0f} %", *steps))
    return table(("model and tasks", "average", "gradient matching", "calibrate", "calibrate, then distill"), rows)


def recovery_table() -> str:
    """What calibration and distillation add to a merge, in percent of joint training's gain."""
    files = {"SmolLM2-135M (loss)": "language-model-0", "MPNet, sentiment (accuracy)": "sentiment-0"}
    found = {
        title: recovery_shares(json.loads((EXPERIMENTS / f"results/recovery/{name}.json").read_text("utf-8")))
        for title, name in files.items()
    }
    steps = {
        "average": "average",
        "TIES": "ties",
        "gradient matching": "gradient-matching",
        "average, then `calibrate --curvature none`": "calibrate --curvature none",
        "average, then `calibrate`": "calibrate",
        "average, then `distill`": "distill",
        "average, `calibrate --curvature none`, `distill`": "calibrate --curvature none, distill",
    }
    rows = [(title, *(f"{kept[step][0]:.0f} %" for kept in found.values())) for title, step in steps.items()]
    return table(("steps", *found), rows) + (
        "\n\nOne seed, 256 unlabeled rows per task, five tasks each (`experiments/results/recovery/`)."
    )


def removal_kept() -> str:
    """How far each way of removing comes towards the retrained model."""
    shares = results_tables.removal_shares()
    ways = ("negation", "gradient matching", "gradient matching, tuned under H_0", "influence steps")
    rows = []
    for way in (*ways, results_tables.RETRAINED):
        every = [points.get(way, ()) for points in shares.values()]
        rows.append((way, *(f"{fmean(one for one, _ in points):.0f} %" if points else "–" for points in every)))
    return table(("", *shares), rows)


def mergekit_speed() -> str:
    """The same recipes by both programs, for the methods that are used most."""
    found = json.loads((BENCHMARKS / "results/same_work.json").read_text("utf-8"))["rows"]
    rows = []
    for row in found:
        if row["method"] in ("linear", "task_arithmetic", "slerp", "ties", "dare_ties", "model_stock"):
            seconds = (f"{row['wall_s'][program]:.1f}" for program in ("gradmerge", "mergekit"))
            rows.append((f"`{row['method']}`", *seconds, f"{row['times_as_fast']:.1f}"))
    return table(("method", "gradmerge", "mergekit", "times as fast"), rows)


GENERATED: dict[str, Callable[[], str]] = {
    "main-results": main_results,
    "mergekit-speed": mergekit_speed,
    "recovery": recovery_table,
    "removal-kept": removal_kept,
    "cli": cli_reference,
    "columns": usual_columns,
    "mergekit": mergekit_methods,
    "methods": methods_reference,
    "rule-inputs": rule_inputs,
    "metrics": metrics_reference,
    "python": python_names,
    "recipe": recipe_reference,
    **{name: partial(script, path) for name, path in SCRIPTS.items()},
    **TABLES,
    **results_tables.TABLES,
}


if __name__ == "__main__":
    main()
