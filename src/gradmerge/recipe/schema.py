"""The keys of a recipe: the one place where they are declared."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr

from ..display import OneLine
from ..notes import Note
from ..rules import METHODS, Rule
from .fields import CurvatureSource, PenaltySource, RecipePart, Reduction, Reference, Size, as_text, number_or
from .rule_options import check_options
from .schedules import Varying, Weight
from .slices import options_in_common
from .tokenizer import Tokenizer


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
    adapter: Reference | None = Field(
        None, description="A PEFT LoRA adapter to put on top of the model, whatever base its config names."
    )
    rename: dict[str, str] = Field(
        {},
        description="Beginnings of this model's tensor names, each with what to put there; the first that fits counts.",
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
        description="How much the model counts (α_t, w_t): 0, or a number from 1e-30 to 1e30 in size; a list of them, "
        "spread over the layers; or cases by filter. For `removal`, the strength.",
    )
    options: dict[str, Any] = Field(
        {}, description="Options of the method that may differ between models, such as `density`, for this one."
    )


Layers = Annotated[tuple[int, int], Field(description="The first layer, and one past the last.")]


class SliceModel(Model):
    """A model whose layers go into a slice."""

    layers: Layers = Field(description="Its layers: the first, and one past the last, counted from 0.")


class Slice(RecipePart):
    """Some layers of the result, and the layers that they are merged from."""

    models: list[SliceModel] = Field(min_length=1, description="The models, each with its `layers`.")
    base: Layers | None = Field(None, description="The layers of the base. Default: those of the slice's first model.")
    options: dict[str, Any] = Field({}, description="Options of the method for these layers.")


class Output(RecipePart):
    """What is written."""

    dtype: Literal["auto", "widest", "float64", "float32", "float16", "bfloat16"] = Field(
        "auto",
        description="Type of the merged weights; `auto` keeps the base's, tensor by tensor; `widest` is the one that "
        "holds those of all models.",
    )
    shard_size: Size = Field(5_000_000_000, description="Largest size of one file, such as `5GB`, `500MB`, `2GiB`.")
    curvature: bool = Field(
        False,
        description="Also write H̄, the curvature of the result, to `OUT/curvature/`, so that it can be merged again.",
    )
    format: Literal["model", "adapter"] = Field("model", description="A whole model, or one LoRA adapter for the base.")
    rank: Annotated[int, Field(ge=1, le=10**6)] | None = Field(
        None,
        description="Largest rank of an adapter that is written; what it loses is reported. Default: the ranks of the "
        "adapters together, which loses nothing; other merges than weighted sums of adapters need one.",
    )
    license: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9.+-]{0,63}$")] | None = Field(
        None,
        description="Identifier of the licence for the model card, such as `apache-2.0`, where those of the models are "
        "not the same. Default: the one that all of them have.",
    )


class Recipe(OneLine, RecipePart):
    """A merge, as written in YAML."""

    name: str | None = Field(
        None,
        min_length=1,
        description="Of one recipe among several in a file (YAML documents): the name by which others use its result.",
    )
    method: str = Field(description="The method; `gradmerge methods` lists them.")
    base: Annotated[Base, BeforeValidator(_from_path)] | None = Field(
        None,
        description="The base model: a mapping, or only its path. Methods that do not use one can do without; the "
        "first model then gives config, tokenizer, types and excluded tensors.",
    )
    models: list[Annotated[Model, BeforeValidator(_from_path)]] = Field(
        default_factory=list, description="The tuned models: mappings, or only their paths."
    )
    slices: list[Slice] = Field([], description="Instead of `models`: the layers of the result, from first to last.")
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
    tokenizer: Tokenizer | None = Field(
        None,
        description="The vocabulary of the result: that of the `base`, the `union` of all, or a model's; rows are then "
        "matched by token. Also `{source: …, tokens: {TOKEN: …}, pad_to_multiple_of: N}`. Default: the base's, and "
        "models must have the same.",
    )
    chat_template: str = Field(
        "auto",
        description="`auto` (the base's, with a note if models differ), `base`, `common` (the one that most models "
        "have), a model of the recipe, or a file.",
    )

    _folder: Path = PrivateAttr(default_factory=Path)
    _file: Path | None = PrivateAttr(default=None)
    _merges: dict[str, Recipe] = PrivateAttr(default_factory=dict)
    _made: dict[str, Path] = PrivateAttr(default_factory=dict)
    _notes: list[Note] = PrivateAttr(default_factory=list)
    _layers: dict[str, str] = PrivateAttr(default_factory=dict)
    _rule: Rule | None = PrivateAttr(default=None)

    def _line(self) -> list[str]:
        base = "no base" if self.base is None else f"base {self.base.model}"
        return [self.method, base, f"{len(self.slices)} slices" if self.slices else f"{len(self.models)} models"]

    @property
    def folder(self) -> Path:
        """The folder that relative paths start from."""
        return self._folder

    @property
    def file(self) -> Path | None:
        """The file that the recipe was read from."""
        return self._file

    @property
    def merges(self) -> dict[str, Recipe]:
        """The named recipes whose results this one uses, in the order in which they have to be made."""
        return self._merges

    @property
    def notes(self) -> list[Note]:
        """What should be known of how it was read."""
        return self._notes

    @property
    def references(self) -> list[str]:
        """The models that it names, the base first."""
        return list(dict.fromkeys(part.model for part in (self.base, *self.sources) if part is not None))

    @property
    def made(self) -> dict[str, Path]:
        """Where the results of named recipes are, by their names."""
        return self._made

    def with_made(self, made: dict[str, Path], notes: list[Note] | None = None) -> Recipe:
        """The recipe, with the results of named ones at hand."""
        copy = self.model_copy(deep=True).read_as(self)
        copy._made = {name: folder.absolute() for name, folder in made.items() if name in self.references}
        copy._notes = self._notes if notes is None else notes
        return copy

    def read_as(self, other: Recipe) -> Recipe:
        """Itself, as a changed copy of another: from its file, with its named recipes and notes."""
        for own in ("_folder", "_file", "_merges", "_made", "_notes", "_layers"):
            setattr(self, own, getattr(other, own))
        return self

    def where(self, key: str) -> str:
        """What layers of a slice are called in messages: the key, or the line of a recipe of mergekit's."""
        return self._layers.get(key, key)

    @property
    def rule(self) -> Rule:
        """The rule of the method: that of the recipe's Python file, or the one of this name."""
        return METHODS[self.method] if self._rule is None else self._rule

    def to_dict(self, **how: Any) -> dict[str, Any]:
        """Return the keys as they are written to files, where a rule from a Python file is named by its path."""
        return self.model_dump(mode="json", **how) | {"method": self.rule.file or self.method}

    @property
    def resolved_options(self) -> dict[str, Any]:
        """The method's options, with defaults filled in."""
        if self.slices:
            return options_in_common(self)
        return check_options(self.rule, self.options, self.own_options)

    @property
    def own_options(self) -> list[dict[str, Any]]:
        """The options that each model has of its own."""
        return [model.options for model in self.models]

    @property
    def weights(self) -> list[Varying]:
        return [model.weight for model in self.sources]

    @property
    def sources(self) -> list[Model]:
        """The models, or those of every slice, in the order of the recipe."""
        return [*self.models, *(model for part in self.slices for model in part.models)]
