"""The card of a curvature folder: what the sums are of, and how to use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from ..markdown import as_block, as_card, as_code, as_text
from ..text import size
from .format import STEM, CurvatureFile, open_curvature

CARD = "README.md"
SUMS = {
    "diagonal": "For every parameter, the **sum** over examples of the squared gradient of an example's loss.",
    "gram": "For every linear layer XᵀX, the **sum** over all tokens of its inputs' outer products, for `regmean`.",
    "kronecker": "For every linear layer two Kronecker factors, **sums** over all tokens of the outer products of its "
    "inputs (`NAME.A`) and of the gradients of its outputs (`NAME.G`); for every other parameter the sum over examples "
    "of the squared gradient.",
}
OF_MERGES = (
    "H̄ = H_0 + Σ α_t H_t of a merge, in sums over examples: the precision of the merged model, which serves as its "
    "curvature when it is merged again."
)
LIKELIHOODS = {
    "empirical": "the labels of the data",
    "sampled": "labels drawn from the model",
    "exact": "the expectation over the model's classes",
    "adam": "from the second moments that Adam left behind",
    "ivon": "from the curvature that IVON left behind",
}


def write_curvature_card(folder: Path, facts: Mapping[str, str] | None = None, what: str = "") -> None:
    """Write README.md into a curvature folder; ``facts`` is more that is known, such as the data."""
    with open_curvature(str(folder)) as file:
        (folder / CARD).write_text(curvature_card(file, facts, what), "utf-8")


def curvature_card(file: CurvatureFile, facts: Mapping[str, str] | None = None, what: str = "") -> str:
    """README.md of a curvature folder; ``what`` says what it holds, if not what was estimated."""
    model = file.metadata.get("model", "")
    entries = sum(math.prod(shape) for shape in file.shapes.values())
    nbytes = sum(path.stat().st_size for path in file.files())
    likelihood = file.likelihood
    told = {
        "model": as_code(model) if model else "not named",
        "kind": file.kind,
        "examples": f"{file.examples:,}",
        "likelihood": f"{as_text(likelihood)}: {LIKELIHOODS.get(likelihood, 'not known')}" if likelihood else "",
        **{key: as_code(text) for key, text in (facts or {}).items()},
        "stored as": f"{file.precision}, {len(file.shapes)} tensors, {entries:,} entries, {size(nbytes)}",
    }
    rows = "\n".join(f"| {key} | {text} |" for key, text in told.items() if text)
    method = "regmean" if file.kind == "gram" else "gradient-matching"
    recipe = f"method: {method}\nbase: ./base\nmodels:\n- model: ./model\n  curvature: ./{STEM}\n"
    return as_card(
        {"tags": ["gradmerge", STEM]},
        f"""# {f"Curvature of {as_text(model)}" if model else "Curvature"}

{what or SUMS[file.kind]}

| | |
|---|---|
{rows}

## Usage

As the folder `{STEM}` inside the model's folder or repository it is found by itself. Elsewhere, a recipe names it:

{as_block("yaml", recipe)}

`gradmerge {STEM} show` prints what it holds, `gradmerge merge recipe.yml -o merged` merges with it. It holds no data,
but is made from data: of a classifier it tells, for one, which words occurred.
""",
    )
