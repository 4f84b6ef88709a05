"""The model card of a merged model, with Hugging Face front matter."""

from __future__ import annotations

from typing import Any

import yaml

from .._version import __version__
from ..checkpoints.opening import HUB_ID
from ..recipe import Recipe


def model_card(recipe: Recipe, name: str, has_config: bool) -> str:
    """README.md: what was merged, by which rule, and the recipe to do it again. The same inputs give the same text."""
    rule = recipe.rule
    every = [*([recipe.base.model] if recipe.base else []), *(m.model for m in recipe.models)]
    front: dict[str, Any] = {
        "base_model": list(dict.fromkeys(_repository(reference) for reference in every)),
        "tags": ["merge", "gradmerge"],
    }
    if has_config:
        front = {"base_model": front["base_model"], "library_name": "transformers", "tags": front["tags"]}
    yaml_recipe = yaml.safe_dump(recipe_as_written(recipe), sort_keys=False, allow_unicode=True)
    rows = []
    if recipe.base:
        rows.append(
            f"| base | `{recipe.base.model}` | {_number(recipe.base.weight)} | {_curvature(recipe.base.curvature)} |"
        )
    rows += [f"| tuned | `{m.model}` | {_number(m.weight)} | {_curvature(m.curvature)} |" for m in recipe.models]
    table = "\n".join(["| | model | weight | curvature |", "|---|---|---|---|", *rows])
    return f"""---
{yaml.safe_dump(front, sort_keys=False, allow_unicode=True)}---

# {name}

{"Made from" if rule.name == "removal" else "A merge of"} {len(recipe.models)} fine-tuned {_plural(len(recipe.models))} by \
**{rule.name}** with gradmerge {__version__}.

{rule.summary}
({rule.reference})

{table}

## Recipe

```yaml
{yaml_recipe}```

`gradmerge.json` in this repository holds the full recipe with defaults, digests of the inputs and versions.
"""


def recipe_as_written(recipe: Recipe) -> dict[str, Any]:
    """The recipe without what is at its default."""
    return recipe.model_dump(mode="json", exclude_defaults=True)


def _repository(reference: str) -> str:
    """A Hub id without its revision; anything else as it is."""
    return reference.partition("@")[0] if HUB_ID.fullmatch(reference) else reference


def _plural(count: int) -> str:
    return "model" if count == 1 else "models"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:g}"


def _curvature(value: Any) -> str:
    if value is None:
        return ""
    return f"`{value}`" if isinstance(value, str) else f"{value.identity:g} · I"
