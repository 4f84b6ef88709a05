"""`gradmerge inspect`."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..text import count, one_line, size
from .options import Printing, command
from .output import AllowConfig, AllowPickle, Dequantize, continued, print_json, print_table
from .stdio import say

if TYPE_CHECKING:
    from pathlib import Path

    from ..checkpoints import Checkpoint

EXAMPLE = "Examples: gradmerge inspect ./model   ·   gradmerge inspect ./base ./yelp ./sst2"


@command
def inspect(
    *,
    model: Annotated[list[str], typer.Argument(metavar="MODEL", help="Models; the first is taken as the base.")],
    exclude: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="Leave tensors out of the comparison.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    allow_pickle: AllowPickle = False,
    allow_config: AllowConfig = None,
    dequantize: Dequantize = False,
    printing: Printing,
) -> None:
    """Show what is inside a model; with several, whether they can be merged (exit status 2 if not)."""
    from ..checkpoints import compare, open_checkpoint

    with contextlib.ExitStack() as opened:
        allowed: dict[str, Any] = {"allow_pickle": allow_pickle, "dequantize": dequantize}
        first = opened.enter_context(open_checkpoint(model[0], **allowed))
        others = [
            opened.enter_context(open_checkpoint(reference, adapter_base=first, **allowed)) for reference in model[1:]
        ]
        facts = [_facts(checkpoint, tensors) for checkpoint in (first, *others)]
        comparison = None
        if others:
            comparison = compare(first, others, exclude=exclude or (), allow_config=allow_config or ())
            comparison.notes += [text for checkpoint in (first, *others) for text in checkpoint.notes]
        if printing.json:
            result: dict[str, Any] = {"models": facts}
            if comparison is not None:
                result |= {
                    "mergeable": not comparison.problems,
                    "merged_tensors": len(comparison.merged),
                    "copied_tensors": len(comparison.copied),
                    "problems": comparison.problems,
                    "notes": comparison.notes,
                }
            print_json(result)
        elif not printing.quiet:
            for checkpoint, fact in zip((first, *others), facts, strict=True):
                _print_model(checkpoint, fact, tensors)
            if comparison is not None:
                _print_comparison(comparison)
        elif comparison is not None:
            for problem in comparison.problems:
                say(f"error: {continued(problem)}", err=True)
        if comparison is not None and comparison.problems:
            raise typer.Exit(2)


def _facts(checkpoint: Checkpoint, tensors: bool) -> dict[str, Any]:
    from ..checkpoints.compat.compare import is_buffer
    from ..checkpoints.lora import AdapterCheckpoint
    from ..checkpoints.quantization import quantisation
    from ..curvature.format import default_curvature

    types: Counter[str] = Counter()
    for info in checkpoint.tensors.values():
        types[info.dtype] += info.numel
    facts: dict[str, Any] = {
        "model": checkpoint.label,
        "kind": checkpoint.kind,
        "architecture": _architecture(checkpoint),
        "parameters": checkpoint.parameters,
        "tensors": len(checkpoint.tensors),
        "bytes": checkpoint.nbytes,
        "types": dict(types),
        "vocabulary": checkpoint.config.get("vocab_size"),
        "tied_embeddings": checkpoint.config.get("tie_word_embeddings"),
        "quantised": f"{quantised}. {quantised.advice}" if (quantised := quantisation(checkpoint)) else None,
        "buffers": [name for name, info in checkpoint.tensors.items() if is_buffer(name, info)],
        "files": [_shown(path, checkpoint.folder) for path in checkpoint.files()],
        "curvature": default_curvature(checkpoint.folder) is not None,
    }
    if layers := _layers(checkpoint):
        facts["layers"] = layers
    if isinstance(checkpoint, AdapterCheckpoint):
        facts |= {"base": checkpoint.base.label, "adapter_parameters": checkpoint.adapter.parameters}
    if tensors:
        facts["tensor_list"] = {n: {"dtype": i.dtype, "shape": list(i.shape)} for n, i in checkpoint.tensors.items()}
    return facts


def _shown(path: Path, folder: Path | None) -> str:
    """A file by its name, or by its place in the model's folder where that has others in it."""
    if folder is None or not path.is_relative_to(folder):
        return path.name
    return path.relative_to(folder).as_posix()


def _layers(checkpoint: Checkpoint) -> list[dict[str, Any]]:
    """Which layers came from where, if the model was made of slices and its record says so."""
    from ..engine.plan.slices import shown_layers
    from ..errors import InputError
    from ..io.small_files import MAX_TOKENIZER, read_json

    path = None if checkpoint.folder is None else checkpoint.folder / "gradmerge.json"
    try:
        found = read_json(path, MAX_TOKENIZER).get("layers") if path is not None and path.is_file() else None
        for row in found or ():
            parts = [*row["from"], *([row["base"]] if "base" in row else [])]
            words = [f"{part['model']} {shown_layers(part['layers'])}" for part in parts]
            base = f", on {words.pop()}" if "base" in row else ""
            row["shown"] = f"{shown_layers(row['layers'])}: {', '.join(words)}{base}"
        return found or []
    except (InputError, TypeError, ValueError, KeyError, IndexError, AttributeError):
        return []


def _architecture(checkpoint: Checkpoint) -> str | None:
    stated = checkpoint.config.get("architectures")
    name = stated[0] if isinstance(stated, list) and stated else checkpoint.config.get("model_type")
    return name if isinstance(name, str) else None


def _print_model(checkpoint: Checkpoint, facts: dict[str, Any], tensors: bool) -> None:
    say(one_line(f"{facts['model']} ({facts['architecture'] or facts['kind']})"))
    if "base" in facts:
        say(f"  LoRA adapter with {count(facts['adapter_parameters'])} parameters, on top of {one_line(facts['base'])}")
    shares = ", ".join(f"{dtype} {count(numel)}" for dtype, numel in facts["types"].items())
    say(f"  {count(facts['parameters'])} parameters in {facts['tensors']} tensors, {size(facts['bytes'])} ({shares})")
    for row in facts.get("layers", ()):
        say(one_line(f"  layers {row['shown']}"))
    if facts["quantised"]:
        say(f"  {one_line(facts['quantised'])}")
    details = []
    if facts["vocabulary"]:
        details.append(f"vocabulary {facts['vocabulary']}")
    if facts["tied_embeddings"] is not None and re.search("LM|Generation", str(facts["architecture"])):
        details.append("tied embeddings" if facts["tied_embeddings"] else "untied embeddings")
    if facts["buffers"]:
        details.append(f"{len(facts['buffers'])} buffers")
    details.append("with curvature" if facts["curvature"] else "no curvature/ folder")
    files = ", ".join(facts["files"][:3]) + (" …" if len(facts["files"]) > 3 else "")
    say(one_line(f"  {', '.join(details)}; files: {files}"))
    if tensors:
        rows = [[f"  {n}", i.dtype, str(list(i.shape)), size(i.nbytes)] for n, i in checkpoint.tensors.items()]
        print_table(["  tensor", "type", "shape", "size"], rows, right=(3,))


def _print_comparison(comparison: Any) -> None:
    for text in comparison.notes:
        say(f"note: {continued(text)}")
    if comparison.problems:
        say("These cannot be merged:")
        for problem in comparison.problems:
            say(f"• {continued(problem)}")
    else:
        say(f"These can be merged: {len(comparison.merged)} tensors merged, {len(comparison.copied)} copied.")
