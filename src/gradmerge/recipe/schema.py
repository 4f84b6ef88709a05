"""The keys of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from ..display import OneLine
from ..errors import InputError
from ..notes import Note
from ..rules import METHODS, Rule
from .fields import CurvatureSource, PenaltySource, RecipePart, Reduction, Reference, Size, as_text, number_or
from .method import check_options
from .schedules import Case, Varying, Weight


def _from_path(value: Any) -> Any:
    value = as_text(value)
    return {"model": value} if isinstance(value, str) else value


ZERO = "zero"
"""A row of zeros. A folder of that name is ./zero."""


class ModelToken(RecipePart):
    """The row of one token of one model."""

    kind: Literal["model_token"] = "model_token"
    model: str
    token: str | None = None
    token_id: Annotated[int, Field(ge=0)] | None = None


def _check_source(value: Any) -> Any:
    value = as_text(value)
    if value is None or isinstance(value, str | ModelToken):
        return value
    if isinstance(value, Mapping):
        if value == {"kind": ZERO}:
            return ZERO
        has_one = (value.get("token") is None) != (value.get("token_id") is None)
        if "model" in value and has_one and value.keys() <= {"kind", "model", "token", "token_id"}:
            return value
    raise ValueError("should be a model of the recipe, zero, {model: M, token: T} or {model: M, token_id: N}")


class TokenRule(RecipePart):
    """The source of the row of one token."""

    source: Annotated[str | ModelToken | None, BeforeValidator(_check_source)] = Field(
        None, description="A model, `zero`, or a token of a model. Used for every model that lacks the token."
    )
    force: bool = Field(False, description="Also use it for models that have the token.")


def _source_as_rule(value: Any) -> Any:
    is_rule = isinstance(value, TokenRule) or (isinstance(value, Mapping) and value.keys() <= {"source", "force"})
    return value if is_rule else {"source": value}


class TokenizerChoice(RecipePart):
    """The vocabulary of the result."""

    source: str = Field("union", description="`base`, `union`, or a model of the recipe.")
    tokens: dict[str, Annotated[TokenRule, BeforeValidator(_source_as_rule)]] = Field(
        {},
        description="Token → source of its row: a model, `zero`, or `{model: M, token: T}`. Used for models that lack "
        "the token, and with `force: true` for all models. Tokens that the vocabulary lacks are added.",
    )
    pad_to_multiple_of: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None, description="Add rows until their number is a multiple of this."
    )


def _source_as_choice(value: Any) -> Any:
    value = as_text(value)
    if isinstance(value, str):
        return {"source": value}
    if value is not None and not isinstance(value, Mapping | TokenizerChoice):
        raise ValueError("should be base, union, a model, or {source: …, tokens: {TOKEN: …}, pad_to_multiple_of: N}")
    return value


Tokenizer = Annotated[TokenizerChoice, BeforeValidator(_source_as_choice)]
"""A choice, or only its source."""


class _Source(RecipePart):
    model: Reference = Field(
        description="Folder, `.safetensors` file, Hub id (`org/name@revision`), or PEFT LoRA adapter folder."
    )
    curvature: CurvatureSource | None = Field(
        None, description="Curvature folder or file, or `{identity: c}`. Default: `curvature/` in the model folder."
    )
    adapter: Reference | None = Field(
        None, description="A PEFT LoRA adapter to apply to the model. The base in the adapter's config is ignored."
    )
    rename: dict[str, str] = Field(
        {},
        description="Prefixes of this model's tensor names, each with its replacement. The first that matches applies.",
    )


class Base(_Source):
    """The base model."""

    weight: Weight | None = Field(None, description="The weight of the base; only for `weighted-average`.")
    penalty: PenaltySource | None = Field(
        None,
        description="P, the penalty matrix used in training, for `gradient-matching` and `removal`: a curvature, or "
        "`none` for training without a penalty. Default: the penalty recorded beside each fine-tuned model, else H_0.",
    )
    examples: Annotated[int, Field(ge=1, le=10**18)] | None = Field(
        None,
        description="Dataset size of the base: its curvature is read as that many times its mean. Default: the number "
        "of examples in the curvature file.",
    )


class Model(_Source):
    """A fine-tuned model."""

    weight: Weight = Field(
        1.0,
        description="The weight of the model (α_t, w_t): 0, or a number from 1e-30 to 1e30 in size; a list of numbers, "
        "interpolated over the layers; or cases by filter. For `removal`, the strength.",
    )
    options: dict[str, Any] = Field(
        {}, description="Options of the method that can be set per model, such as `density`, for this model."
    )


Layers = Annotated[tuple[int, int], Field(description="The first layer, and one past the last.")]


class SliceModel(Model):
    """A model whose layers go into a slice."""

    layers: Layers = Field(description="Its layers: the first, counted from 0, and one past the last.")


class Slice(RecipePart):
    """Consecutive layers of the result, and the layers that they are merged from."""

    models: list[SliceModel] = Field(min_length=1, description="The models, each with its `layers`.")
    base: Layers | None = Field(None, description="The layers of the base. Default: those of the slice's first model.")
    options: dict[str, Any] = Field({}, description="Options of the method for these layers.")


class Output(RecipePart):
    """What the merge writes."""

    dtype: Literal["auto", "widest", "float64", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Type of the merged weights. `auto`: the base's type, tensor by tensor. `widest`: the type that "
        "holds the values of all models.",
    )
    shard_size: Size = Field(5_000_000_000, description="Largest size of a file, such as `5GB`, `500MB`, `2GiB`.")
    curvature: bool = Field(
        False,
        description="Also write H̄, the curvature of the result, to `OUT/curvature/`, so that the result can be merged.",
    )
    format: Literal["model", "adapter"] = Field("model", description="A full model, or a LoRA adapter for the base.")
    rank: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None,
        description="Largest rank of the written adapter; the loss is reported. Default: the sum of the adapters' "
        "ranks, which is exact. Merges other than weighted sums of adapters need a rank.",
    )
    license: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]{0,63}$")] | None = Field(
        None,
        description="License identifier for the model card, such as `apache-2.0`, if the models' licenses differ. "
        "Default: the license that all models have.",
    )


@dataclass
class Origin:
    """Facts about a recipe that are not among its keys."""

    folder: Path = field(default_factory=Path)
    """Relative paths start here."""
    file: Path | None = None
    rule: Rule | None = None
    """The rule, if the method is a Python file."""
    merges: dict[str, Recipe] = field(default_factory=dict)
    """Recipes of the same file that this one uses by name, in the order in which to merge them."""
    merged_folders: dict[str, Path] = field(default_factory=dict)
    """Name → folder of the result of each named recipe that is merged already."""
    notes: list[Note] = field(default_factory=list)
    """Notes on how the recipe was read."""


class Recipe(OneLine, RecipePart):
    """A merge, as written in YAML."""

    name: str | None = Field(
        None,
        min_length=1,
        description="The name by which other recipes (YAML documents) of the same file use the result.",
    )
    method: str = Field(
        description="The method; `gradmerge methods` lists them. Or a [Python file](../merge.md#write-your-own-method) "
        "with `--allow-code`."
    )
    base: Annotated[Base, BeforeValidator(_from_path)] | None = Field(
        None,
        description="The base model: a mapping, or only its path. Some methods need none; config, tokenizer, types "
        "and excluded tensors then come from the first model.",
    )
    models: list[Annotated[Model, BeforeValidator(_from_path)]] = Field(
        default_factory=list, description="The fine-tuned models: mappings, or only their paths."
    )
    slices: list[Slice] = Field([], description="Instead of `models`: the layers of the result, from first to last.")
    reduction: Reduction = Field(
        "sum",
        description="How to read curvature files: the sum over examples, the mean, or N times the mean.",
    )
    damping: Annotated[float | Literal["auto"], number_or("auto", 0)] = Field(
        "auto",
        description="δ, added to the prior; in Fisher averaging and RegMean to the curvature of every model. `auto`: "
        "the mean over all entries of Σ F_t for `removal`, and 1e-10 for other methods. In layers of a merge with "
        "Kronecker curvature `auto` is a fifth of the layer's mean curvature.",
    )
    include: list[str] = Field(["*"], min_length=1, description="Glob patterns of the tensor names to merge.")
    exclude: list[str] = Field([], description="Glob patterns of the tensor names to copy from the base.")
    missing: Literal["error", "zero"] = Field(
        "error", description="A parameter that a curvature file lacks is an error, or counts as 0."
    )
    options: dict[str, Any] = Field({}, description="Options of the method; `gradmerge methods NAME` explains them.")
    output: Output = Field(default_factory=Output, description="What the merge writes.")
    tokenizer: Tokenizer | None = Field(
        None,
        description="The vocabulary of the result: `base`, `union` (of all models), or a model; rows are then "
        "matched by token. Also `{source: …, tokens: {TOKEN: …}, pad_to_multiple_of: N}`. Default: the base's, and "
        "all models must have the same.",
    )
    chat_template: str = Field(
        "auto",
        description="`auto` (the base's, with a note if models differ), `base`, `common` (the template of most "
        "models), a model of the recipe, or a file.",
    )

    _origin: Origin = PrivateAttr(default_factory=Origin)

    def _line(self) -> list[str]:
        base = "no base" if self.base is None else f"base {self.base.model}"
        return [self.method, base, f"{len(self.slices)} slices" if self.slices else f"{len(self.models)} models"]

    @property
    def folder(self) -> Path:
        """The folder where relative paths start."""
        return self._origin.folder

    @property
    def file(self) -> Path | None:
        """The file that the recipe was read from."""
        return self._origin.file

    @property
    def merges(self) -> dict[str, Recipe]:
        """The named recipes that this one uses, in the order in which to merge them."""
        return self._origin.merges

    @property
    def merged_folders(self) -> dict[str, Path]:
        """Name → folder of the result of each named recipe that is merged already."""
        return self._origin.merged_folders

    @property
    def notes(self) -> list[Note]:
        """Notes on how the recipe was read."""
        return self._origin.notes

    def with_merged_folders(self, merged_folders: dict[str, Path], notes: list[Note] | None = None) -> Recipe:
        """Return a copy that finds the results of named recipes in these folders."""
        copy = self.model_copy(deep=True)
        used = {name: folder.absolute() for name, folder in merged_folders.items() if name in self.references}
        copy._origin = replace(self._origin, merged_folders=used, notes=self.notes if notes is None else notes)
        return copy

    def with_origin(self, other: Recipe) -> Recipe:
        """Return this recipe as a changed version of another: with its file, folder, named recipes and notes."""
        self._origin = replace(other._origin, rule=self._origin.rule)
        return self

    @property
    def rule(self) -> Rule:
        """The rule of the method: from the recipe's Python file, or the built-in or installed rule."""
        return METHODS[self.method] if self._origin.rule is None else self._origin.rule

    def to_dict(self, **how: Any) -> dict[str, Any]:
        """Return the recipe as written to files: a rule from a Python file is named by its path."""
        return self.model_dump(mode="json", **how) | {"method": self.rule.file or self.method}

    @property
    def resolved_options(self) -> dict[str, Any]:
        """The options of the method, with defaults filled in. One that differs between slices has a case per slice."""
        if not self.slices:
            return check_options(self.rule, self.options, self.own_options)
        options = self.options_of_slices
        common = dict(options[0])
        for name, first in common.items():
            values = [own[name] for own in options]
            if all(value == first for value in values):
                continue
            if name == "scope":  # thresholds are computed over all slices
                raise InputError("slices: options.scope differs between slices. Set it in `options` of the recipe")
            common[name] = tuple(Case(filter=f"slices[{i}]", value=value) for i, value in enumerate(values))
        return common

    @property
    def options_of_slices(self) -> list[dict[str, Any]]:
        """The options of each slice, including those of the recipe and defaults."""
        options = []
        for number, part in enumerate(self.slices):
            own, where = [model.options for model in part.models], f"slices[{number}].models[{{}}].options"
            try:
                options.append(check_options(self.rule, {**self.options, **part.options}, own, where))
            except InputError as error:
                in_slice = part.options and str(error).startswith("options")
                raise InputError(f"slices[{number}].{error}" if in_slice else str(error)) from None
        return options

    @property
    def slice_lengths(self) -> list[int]:
        """The number of layers of each slice."""
        return [part.models[0].layers[1] - part.models[0].layers[0] for part in self.slices]

    @property
    def own_options(self) -> list[dict[str, Any]]:
        """The options that each model sets for itself."""
        return [model.options for model in self.models]

    @property
    def sources(self) -> list[Model]:
        """The models, or those of every slice, in the order of the recipe."""
        return [*self.models, *(model for part in self.slices for model in part.models)]

    @property
    def references(self) -> list[str]:
        """The model references, the base first."""
        return list(dict.fromkeys(part.model for part in (self.base, *self.sources) if part is not None))

    @property
    def weights(self) -> list[Varying]:
        """The weights of the models."""
        return [model.weight for model in self.sources]
