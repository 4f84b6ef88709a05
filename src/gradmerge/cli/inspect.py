"""`gradmerge inspect`: what models contain, and whether they can be merged."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..api.merge import merge
from ..text import count, one_line, size
from .options import Printing, command
from .output import echo, indented, print_json, print_table, with_options

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint

EXAMPLE = "Examples: gradmerge inspect ./model   ·   gradmerge inspect ./base ./yelp ./sst2"


@command(api=merge, only=["allow_pickle", "allow_config", "dequantize"])
def inspect(
    *,
    model: Annotated[
        list[str], typer.Argument(metavar="MODEL...", help="Models: folders, Hub ids or PEFT adapters. The base first.")
    ],
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="GLOB", help="Tensors that are not compared. Repeatable.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors of each model.")] = False,
    options: dict[str, Any],
    printing: Printing,
) -> None:
    """Show what models contain, and whether they can be merged. The exit status is 2 if they cannot."""
    from ..checkpoints import compare, open_checkpoint

    with contextlib.ExitStack() as stack:
        allow_config = options.pop("allow_config")
        first = stack.enter_context(open_checkpoint(model[0], **options))
        others = [stack.enter_context(open_checkpoint(name, adapter_base=first, **options)) for name in model[1:]]
        checkpoints = [first, *others]
        facts = [_facts(checkpoint, tensors) for checkpoint in checkpoints]
        result: dict[str, Any] = {"models": facts}
        if others:
            comparison = compare(first, others, exclude=exclude or (), allow_config=allow_config)
            result |= {
                "mergeable": not comparison.problems,
                "merged_tensors": len(comparison.merged),
                "copied_tensors": len(comparison.copied),
                "problems": [with_options(problem, ["allow_config", *options]) for problem in comparison.problems],
                "notes": [*comparison.notes, *(note for checkpoint in checkpoints for note in checkpoint.notes)],
            }
    problems = result.get("problems", [])
    if printing.json:
        print_json(result)
    elif printing.quiet:
        for problem in problems:
            echo(f"error: {indented(problem)}", err=True)
    else:
        for item in facts:
            _print_model(item)
        if others:
            _print_comparison(result)
    if problems:
        raise typer.Exit(2)


def _facts(checkpoint: Checkpoint, list_tensors: bool) -> dict[str, Any]:
    """Return what `--json` prints of a model."""
    from ..checkpoints.comparison import is_buffer
    from ..checkpoints.lora import AdapterCheckpoint
    from ..checkpoints.quantization import ADVICE, detect_quantization
    from ..curvature.format import default_curvature

    config, tensors, folder = checkpoint.config, checkpoint.tensors, checkpoint.folder
    types: Counter[str] = Counter()
    for info in tensors.values():
        types[info.dtype] += info.numel
    architectures = config.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else config.get("model_type")
    quantized = detect_quantization(checkpoint)
    facts: dict[str, Any] = {
        "model": checkpoint.label,
        "kind": checkpoint.kind,
        "architecture": architecture if isinstance(architecture, str) else None,
        "parameters": checkpoint.parameters,
        "tensors": len(tensors),
        "bytes": checkpoint.nbytes,
        "types": dict(types),
        "vocabulary": config.get("vocab_size"),
        "tied_embeddings": config.get("tie_word_embeddings"),
        "quantized": f"{quantized}. {ADVICE}" if quantized else None,
        "buffers": [name for name, info in tensors.items() if is_buffer(name, info)],
        "files": [
            path.relative_to(folder).as_posix() if folder is not None and path.is_relative_to(folder) else path.name
            for path in checkpoint.files()
        ],
        "curvature": default_curvature(folder) is not None,
    }
    if isinstance(checkpoint, AdapterCheckpoint):
        facts |= {"base": checkpoint.base.label, "adapter_parameters": checkpoint.adapter.parameters}
    if list_tensors:
        facts["tensor_list"] = {
            name: {"dtype": info.dtype, "shape": list(info.shape), "bytes": info.nbytes}
            for name, info in tensors.items()
        }
    return facts


def _print_model(facts: dict[str, Any]) -> None:
    echo(one_line(f"{facts['model']} ({facts['architecture'] or facts['kind']})"))
    if "base" in facts:
        echo(
            f"  LoRA adapter with {count(facts['adapter_parameters'])} parameters, on top of {one_line(facts['base'])}"
        )
    types = ", ".join(f"{dtype} {count(numel)}" for dtype, numel in facts["types"].items())
    echo(f"  {count(facts['parameters'])} parameters in {facts['tensors']} tensors, {size(facts['bytes'])} ({types})")
    if facts["quantized"]:
        echo(f"  {one_line(facts['quantized'])}")
    details = [f"vocabulary {facts['vocabulary']}"] if facts["vocabulary"] else []
    if facts["tied_embeddings"] is not None and re.search("LM|Generation", str(facts["architecture"])):
        details.append("tied embeddings" if facts["tied_embeddings"] else "untied embeddings")
    if facts["buffers"]:
        details.append(f"{len(facts['buffers'])} buffers")
    details.append("with curvature" if facts["curvature"] else "no curvature/ folder")
    files = ", ".join(facts["files"][:3]) + (" …" if len(facts["files"]) > 3 else "")
    echo(one_line(f"  {', '.join(details)}; files: {files}"))
    if "tensor_list" in facts:
        items = facts["tensor_list"].items()
        rows = [[f"  {name}", info["dtype"], str(info["shape"]), size(info["bytes"])] for name, info in items]
        print_table(["  tensor", "type", "shape", "size"], rows, right=(3,))


def _print_comparison(result: dict[str, Any]) -> None:
    for note in result["notes"]:
        echo(f"note: {indented(note)}")
    if result["problems"]:
        echo("These cannot be merged:")
        for problem in result["problems"]:
            echo(f"• {indented(problem)}")
    else:
        merged, copied = result["merged_tensors"], result["copied_tensors"]
        echo(f"These can be merged: {merged} tensors merged, {copied} copied.")
