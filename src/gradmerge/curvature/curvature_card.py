"""The card of a curvature folder: what the sums are of, and how to use them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from ..cards.card import render_card
from ..cards.markdown import as_block, as_code, as_text, markdown_table
from ..text import size
from .format import STEM, CurvatureFile, open_curvature

CARD = "README.md"
KINDS = {
    "diagonal": "For every parameter, the **sum** over examples of the squared gradient of an example's loss.",
    "gram": "For every linear layer XᵀX, the **sum** over all tokens of the outer products of its inputs. `regmean` "
    "uses it.",
    "kronecker": "For every linear layer two Kronecker factors: **sums** over all tokens of the outer products of its "
    "inputs (`NAME.A`) and of the gradients of its outputs (`NAME.G`). For every other parameter, the sum over "
    "examples of the squared gradient.",
}
OF_MERGES = (
    "The curvature of a merged model: H̄ = H_0 + Σ α_t H_t, in sums over examples. It is used when the model is merged "
    "again."
)
LIKELIHOODS = {
    "empirical": "labels of the data",
    "sampled": "labels drawn from the model",
    "exact": "expectation over the model's classes",
    "adam": "second moments of Adam",
    "ivon": "curvature estimate of IVON",
}


def write_curvature_card(folder: Path, facts: Mapping[str, str] | None = None, what: str = "") -> None:
    """Write README.md into a curvature folder; see ``curvature_card``."""
    with open_curvature(str(folder)) as file:
        (folder / CARD).write_text(curvature_card(file, facts, what), "utf-8")


def curvature_card(file: CurvatureFile, facts: Mapping[str, str] | None = None, what: str = "") -> str:
    """Return the card of a curvature folder.

    Args:
        file: The curvature.
        facts: What else is known, such as the data.
        what: What the file holds, in Markdown; by default by its kind.
    """
    from huggingface_hub import ModelCardData

    model, likelihood = file.metadata.get("model", ""), file.likelihood
    entries = sum(math.prod(shape) for shape in file.shapes.values())
    nbytes = sum(path.stat().st_size for path in file.files())
    known = {
        "model": as_code(model) if model else "not named",
        "kind": file.kind,
        "examples": f"{file.examples:,}",
        "likelihood": f"{as_text(likelihood)}: {LIKELIHOODS.get(likelihood, 'unknown')}" if likelihood else "",
        **{key: as_code(text) for key, text in (facts or {}).items()},
        "stored as": f"{file.precision}, {len(file.shapes)} tensors, {entries:,} entries, {size(nbytes)}",
    }
    method = "regmean" if file.kind == "gram" else "gradient-matching"
    recipe = f"method: {method}\nbase: ./base\nmodels:\n- model: ./model\n  curvature: ./{STEM}\n"
    usage = f"""By default, a merge uses the folder `{STEM}` inside a model's folder. A recipe can name another:

{as_block("yaml", recipe)}

`gradmerge {STEM} show` prints what it contains, and `gradmerge merge recipe.yml -o merged` merges with it. It contains
no data but depends on the data. For example, the curvature of a classifier shows which words occurred."""
    return render_card(
        ModelCardData(tags=["gradmerge", STEM]),
        f"Curvature of {as_text(model)}" if model else "Curvature",
        f"{what or KINDS[file.kind]}\n\n{markdown_table(['', ''], [row for row in known.items() if row[1]])}",
        usage=usage,
    )
