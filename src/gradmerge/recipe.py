"""The recipe: what to merge and how. The one place where its keys are declared and checked."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PrivateAttr, ValidationError, create_model

from .arguments import checked
from .display import OneLine
from .errors import InputError
from .recipe_values import (
    NONE,
    CurvatureSource,
    Identity,
    MeanTimes,
    Number,
    PenaltySource,
    RecipePart,
    Reduction,
    Reference,
    Size,
    Weight,
    as_text,
    number_or,
    reduction_factor,
)
from .rules import RULES, Rule
from .rules.spec import Option, OrNone
from .safe_yaml import parse_yaml
from .text import nearest

#: With what others need of the values.
__all__ = ["NONE", "Base", "CurvatureSource", "Identity", "MeanTimes", "Model", "Output", "Recipe", "check_options"]
__all__ += ["check_penalty", "load_recipe", "make_recipe", "parse_yaml", "reduction_factor"]

MAX_BYTES = 1_000_000


def _from_path(value: Any) -> Any:
    value = as_text(value)
    return {"model": value} if isinstance(value, str) else value


class _Source(RecipePart):
    model: Reference = Field(
        description="Folder, `.safetensors` file, Hub id (`org/name@revision`), or PEFT LoRA adapter folder."
    )
    curvature: CurvatureSource | None = Field(
        None, description="Curvature folder or file, or `{identity: c}`. Default: the model folder's own `curvature/`."
    )


class Base(_Source):
    """The model that every fine-tune started from."""

    weight: Weight | None = Field(None, description="The base's own weight; only for `weighted-average`.")
    penalty: PenaltySource | None = Field(
        None,
        description="P, the matrix of the penalty that the models were tuned under, for `gradient-matching` and "
        "`removal`: curvature, or `none` if they were tuned without. Default: what is recorded beside each tuned "
        "model, or else H_0.",
    )
    examples: Annotated[int, Field(ge=1, le=10**18)] | None = Field(
        None,
        description="How many examples the base's curvature stands for: it is read as that many times its mean. "
        "Default: those it was estimated on.",
    )


class Model(_Source):
    """One fine-tuned model."""

    weight: Weight = Field(
        1.0,
        description="How much the model counts (α_t, w_t): 0, or a number from 1e-30 to 1e30 in size. For `removal`, "
        "the strength.",
    )


class Output(RecipePart):
    """What is written."""

    dtype: Literal["auto", "float64", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of the merged weights; `auto` keeps the base's, tensor by tensor."
    )
    shard_size: Size = Field(5_000_000_000, description="Largest size of one file, such as `5GB`, `500MB`, `2GiB`.")
    curvature: bool = Field(
        False,
        description="Also write H̄, the curvature of the result, to `OUT/curvature/`, so that it can be merged again.",
    )


class Recipe(OneLine, RecipePart):
    """A merge, as written in YAML."""

    method: str = Field(description="The method; `gradmerge methods` lists them.")
    base: Annotated[Base, BeforeValidator(_from_path)] | None = Field(
        None,
        description="The base model: a mapping, or only its path. Methods that do not use one can do without; the "
        "first model then gives config, tokenizer, types and excluded tensors.",
    )
    models: list[Annotated[Model, BeforeValidator(_from_path)]] = Field(
        min_length=1, description="The tuned models: mappings, or only their paths."
    )
    reduction: Reduction = Field(
        "sum",
        description="How curvature files are read: the sum over examples, the sum divided by their number, or N times "
        "that.",
    )
    damping: Annotated[float | Literal["auto"], number_or("auto", 0)] = Field(
        "auto",
        description="δ, added to the prior (in Fisher averaging and RegMean, to the curvature of every model); `auto` "
        "is the mean over all entries of Σ F_t for `removal`, and 1e-10 elsewhere; in the layers of a merge with "
        "Kronecker curvature, a fifth of the layer's mean curvature.",
    )
    include: list[str] = Field(["*"], min_length=1, description="Glob patterns over tensor names: what is merged.")
    exclude: list[str] = Field([], description="Glob patterns over tensor names: what comes from the base unchanged.")
    missing: Literal["error", "zero"] = Field(
        "error", description="What to do about a parameter that a curvature file lacks: stop, or take it as 0."
    )
    options: dict[str, Any] = Field({}, description="The method's own options; `gradmerge methods NAME` explains them.")
    output: Output = Field(default_factory=Output, description="What is written.")

    _folder: Path = PrivateAttr(default_factory=Path)
    _file: Path | None = PrivateAttr(default=None)

    def _line(self) -> list[str]:
        base = "no base" if self.base is None else f"base {self.base.model}"
        return [self.method, base, f"{len(self.models)} models"]

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return self._folder

    @property
    def file(self) -> Path | None:
        """The file that the recipe was read from."""
        return self._file

    @property
    def rule(self) -> Rule:
        return RULES[self.method]

    @property
    def resolved_options(self) -> dict[str, Any]:
        """The method's options, with defaults filled in."""
        return check_options(self.rule, self.options)

    @property
    def weights(self) -> list[float]:
        return [model.weight for model in self.models]


@checked()
def load_recipe(path: str | Path) -> Recipe:
    """Read and check a recipe file. Relative paths in it start from its folder.

    Args:
        path: The YAML file.

    Returns:
        The recipe, with defaults filled in.

    >>> load_recipe("recipe.yml").weights  # doctest: +SKIP
    [0.3, 0.5]
    """
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path}: is a folder; a recipe is a YAML file")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > MAX_BYTES:
        raise InputError(f"{path}: larger than {MAX_BYTES} bytes; that is no recipe")
    recipe = make_recipe(parse_yaml(raw, str(path)), folder=path.parent, where=str(path))
    recipe._file = path
    return recipe


def make_recipe(value: Any, *, folder: Path | None = None, where: str = "recipe") -> Recipe:
    """Check a recipe that is given as a mapping."""
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: a recipe is a mapping with method, base and models, not {type(value).__name__}")
    method = value.get("method")
    if method is not None and (not isinstance(method, str) or method not in RULES):
        known = f"{nearest(str(method), RULES)}\n  Known are {', '.join(RULES)}."
        raise InputError(f"{where}: method: there is no method {str(method)[:60]!r}{known}")
    try:
        recipe = Recipe.model_validate(dict(value))
        _check_fit(recipe)
    except ValidationError as error:
        raise InputError(_explain(error, where, Recipe)) from None
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    recipe._folder = folder or Path()
    return recipe


def _check_fit(recipe: Recipe) -> None:
    """Weights and penalties that the method does not use are errors; the plan notes curvature that it does not use."""
    rule = recipe.rule
    needs = rule.needs(recipe.resolved_options)
    if recipe.base is None and "base" in needs - rule.optional:
        raise InputError(f"{rule.name} needs a base")
    if recipe.base and recipe.base.weight is not None and "base_weight" not in needs:
        raise InputError(f"base.weight: {rule.name} does not use it; only weighted-average does")
    if recipe.base and recipe.base.penalty is not None and "penalty" not in needs:
        raise InputError(f"base.penalty: {rule.name} does not use it; only removal and gradient-matching do")
    if recipe.base and recipe.base.examples is not None:
        if "prior" not in needs:
            raise InputError(f"base.examples: {rule.name} does not use the base's curvature")
        if isinstance(recipe.base.curvature, Identity):
            raise InputError("base.examples: {identity: c} is taken as it is; only a curvature file is scaled")
        if recipe.reduction == "mean":
            raise InputError("base.examples: with `reduction: mean` no number of examples counts; leave one out")
    if "weights" not in needs and any(weight != 1 for weight in recipe.weights):
        instead = "; weighted-average has" if rule.name == "average" else ""
        raise InputError(f"models: {rule.name} has no weights{instead}")
    if rule.only_one_model and len(recipe.models) != 1:
        raise InputError(f"models: {rule.name} takes the base and one model, not {len(recipe.models)}")
    if recipe.output.curvature and rule.precision is None:
        have = ", ".join(r.name for r in RULES.values() if r.precision)
        raise InputError(f"output.curvature: a {rule.name} merge has no curvature of its own; methods with one: {have}")


def check_penalty(value: Any, where: str) -> CurvatureSource:
    """A penalty as `base.penalty` takes it, from elsewhere."""
    try:
        found = Base.model_validate({"model": "", "penalty": value}).penalty
    except ValidationError as error:
        raise InputError(_explain(error, where, Base)) from None
    if found is None:
        raise InputError(f"{where}: names no penalty")
    return found


def check_options(rule: Rule, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a rule, checked, with defaults filled in."""
    model = _options_model(rule.name, rule.options)
    try:
        return model.model_validate(dict(options)).model_dump()
    except ValidationError as error:
        raise InputError(_explain(error, "options", model, rule.name)) from None


@cache
def _options_model(name: str, options: tuple[Option, ...]) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for option in options:
        default = ... if option.required else option.default
        limits: dict[str, Any] = {"ge": option.help.ge, "gt": option.help.gt, "le": option.help.le}
        kind = Number if option.type is float else option.type
        if option.type == OrNone:
            kind, limits = Annotated[OrNone, number_or(NONE, option.help.ge or 0, option.help.le)], {}
        fields[option.name] = (kind, Field(default, description=option.help.text, **limits))
    return create_model(f"Options of {name}", __base__=RecipePart, **fields)


def _explain(error: ValidationError, where: str, model: type[BaseModel], rule: str = "") -> str:
    """Every mistake on a line of its own: where it is, what is wrong, and the nearest known key."""
    lines = []
    for item in error.errors():
        place = _place(item["loc"])
        if item["type"] == "extra_forbidden":
            known = _known_keys(model, item["loc"][:-1])
            of_rule = f" of {rule}" if rule else ""
            key = str(item["loc"][-1])
            lines.append(f"{place}: unknown key{of_rule}{nearest(key, known)}; known are {', '.join(known) or 'none'}")
        elif item["type"] == "missing":
            lines.append(f"{place}: is missing")
        else:
            shown = _shown(item.get("input"))
            message = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
            lines.append(f"{place}: {message}, but it is {shown}")
    lines = list(dict.fromkeys(lines))
    return f"{where}: {lines[0]}" if len(lines) == 1 else f"{where}:\n  " + "\n  ".join(lines)


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # Python does not write out whole numbers of thousands of digits
        return "a number of thousands of digits"
    return text if len(text) < 60 else text[:57] + "…"


def _place(loc: tuple[int | str, ...]) -> str:
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part not in ("str", "Identity", "MeanTimes") and not part.startswith(("literal[", "function-")):
            text += f".{part}" if text else part
    return text or "recipe"


def _known_keys(model: type[BaseModel], loc: tuple[int | str, ...]) -> list[str]:
    sections: dict[str, type[BaseModel]] = {"base": Base, "models": Model, "output": Output}
    sections.update(Identity=Identity, MeanTimes=MeanTimes)
    for part in loc:
        model = sections.get(str(part), model)
    return list(model.model_fields)
