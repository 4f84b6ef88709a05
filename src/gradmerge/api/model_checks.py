"""The checks of :func:`gradmerge.verify`: unchanged tensors, answers, and the ends of generated texts."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, open_checkpoint
from ..checkpoints.checkpoint import TORCH_TYPES, Buffers
from ..checkpoints.lora import is_adapter, read_adapter_config
from ..checkpoints.tokenizer import token_difference
from ..curvature.batches import moved
from ..curvature.losses import unwrapped
from ..errors import InputError
from ..progress import Progress
from ..quiet import quiet_transformers
from ..refinement.distances import Outputs, answer_divergence
from ..refinement.inputs import read_record, recorded_model, recorded_models, same_head
from ..tasks import LoadOptions
from ..tasks.generation import prompts
from ..tasks.loading import load_tokenizer, read_unlabeled, with_data
from ..tasks.model_files import base_folder_of, folder_of, locate
from ..tasks.models import device_of, empty_model, encoder_prefix, load_model
from ..tasks.text import num_positions
from ..text import counted, some
from .verify import Check

#: Tokens of a row that answers are compared on, rows that are generated from, and tokens of an answer.
LENGTH, GENERATED_ROWS, NEW_TOKENS = 128, 4, 64
#: Answers of base + adapter may differ by this KL in nats, and by this multiple of what rounding the weights costs.
ROUNDING, ROUNDING_FACTOR = 1e-6, 4.0
#: Methods that give base + adapter for one adapter of weight 1.
EXACT = ("task-arithmetic", "gradient-matching", "average", "weighted-average")
CHUNK = 1 << 22
QUESTIONS = (
    "What is the capital of France? Answer in one word.",
    "Is 17 a prime number? Answer yes or no.",
    "Name a color of the rainbow.",
    "Write one sentence about the sea.",
    "The film was slow, but the ending is very good.",
    "Translate to German: The house is blue.",
    "def add(a, b):",
    "The president of the United States said on Monday that",
)


@dataclass
class Parents:
    """What a model was made of, from its record and those of the models that it was refined from."""

    models: dict[str, str]
    """Name → the fine-tuned models."""
    base: str | None = None
    recipe: dict[str, Any] = field(default_factory=dict)
    refined: bool = False
    """The merge was calibrated or distilled."""

    @staticmethod
    def find(folder: Path, models: Sequence[str]) -> Parents:
        record, home = read_record(folder), folder
        parents = Parents(dict(zip(models, models, strict=True)) or recorded_models(folder))
        if not parents.models:
            raise InputError(f"{folder}: has no gradmerge.json that names its models. Give them as models")
        while "recipe" not in record and (merged := recorded_model(home, record.get("merged"))) is not None:
            home, parents.refined = Path(merged), True
            record = read_record(home)
        if not models:
            parents.recipe = record.get("recipe") or {}
            parents.base = recorded_model(home, record.get("base"))
        return parents

    def is_added(self, name: str) -> bool:
        """Return whether the merge adds a model, so that the result should be closer to it than the base is."""
        entries = self.recipe.get("models", [])
        if self.recipe.get("method") == "removal" or len(entries) != len(self.models):
            return self.recipe.get("method") != "removal"
        weight = dict(zip(self.models, (entry.get("weight", 1.0) for entry in entries), strict=True))[name]
        return not isinstance(weight, int | float) or weight > 0

    def exact_adapter(self) -> str | None:
        """Return the name of the adapter, if the result should answer exactly as its base with this adapter."""
        ((name, reference), *others), recipe = self.models.items(), self.recipe
        folder = folder_of(reference)
        if others or self.refined or not is_adapter(folder):
            return None
        if recipe and (
            recipe["method"] not in EXACT
            or (recipe["include"], recipe["exclude"], recipe["slices"]) != (["*"], [], [])
            or recipe["options"].get("scale", 1.0) != 1.0
            or recipe["models"][0]["weight"] != 1.0
        ):
            return None
        base = base_folder_of(reference, folder, read_adapter_config(folder))
        self.base = self.base or str(base)
        return name if folder_of(self.base).resolve() == base.resolve() else None

    def excludes(self, name: str) -> bool:
        """Return whether the recipe excludes a tensor."""

        def fits(patterns: Sequence[str]) -> bool:
            return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)

        return bool(self.recipe) and (not fits(self.recipe["include"]) or fits(self.recipe["exclude"]))


def check_model(model: str, data: str | None, parents: Parents, options: LoadOptions, bar: Progress) -> list[Check]:
    """Run all checks."""
    runner = Runner(model, parents, data, options, bar)
    try:
        ours = runner.run(model)
    except InputError as error:
        return [Check("loads", "", False, str(error))]
    checks = [Check("loads", "", True, f"{type(runner.module).__name__} with from_pretrained")]
    checks.append(_check_unchanged(folder_of(model), parents))
    if not all(bool(values.isfinite().all()) for values in ours.answers):
        return [*checks, Check("answers", "", False, "answers are NaN or infinite")]
    answers, generated = _check_answers(runner, parents)
    return [*checks, *answers, *([_check_generation(ours, generated)] if generated else [])]


def _check_unchanged(folder: Path, parents: Parents) -> Check:
    """Compare the tensors that the recipe excludes with those of the base."""
    recipe, template = parents.recipe, parents.base or next(iter(parents.models.values()))
    if not recipe or recipe["slices"] or is_adapter(folder) or (recipe["base"] or {}).get("rename"):
        return Check("unchanged", "", None, "excluded tensors are known for merges of whole models with a recipe")
    with open_checkpoint(folder) as ours, open_checkpoint(template, dequantize=True) as base:
        names = [name for name in base.tensors if parents.excludes(name)]
        wrong = [name for name in names if not _equal(ours, base, name, bool(recipe["tokenizer"]))]
    if wrong:
        return Check("unchanged", template, False, f"{counted(wrong, 'excluded tensor')} changed: {some(wrong, 4)}")
    detail = f"{counted(names, 'excluded tensor')} equal" if names else "the recipe excludes no tensor"
    return Check("unchanged", template, True if names else None, detail)


def _equal(ours: Checkpoint, base: Checkpoint, name: str, other_vocabulary: bool) -> bool:
    """Return whether a tensor has the base's values, in the type in which it is stored."""
    info = ours.tensors.get(name)
    if info is None or info.shape != base.tensors[name].shape:
        return info is not None and other_vocabulary
    dtype = TORCH_TYPES[info.dtype]
    for start in range(0, info.numel, CHUNK):
        a, b = (one.read(name, start, min(start + CHUNK, info.numel), Buffers()).to(dtype) for one in (ours, base))
        if not bool(((a == b) | ((a != a) & (b != b))).all()):
            return False
    return True


def _check_answers(runner: Runner, parents: Parents) -> tuple[list[Check], dict[str, ModelRun]]:
    """Compare answers with those of every fine-tuned model. Also returns what these models generated."""
    exact, checks, generated = parents.exact_adapter(), [], {}
    for name, reference in parents.models.items():
        if (reason := runner.difference(reference)) is not None:
            checks.append(Check("answers", name, None, reason))
            continue
        head = None if runner.shares_head(reference) else reference
        theirs = runner.run(reference, adapter=name == exact)
        if theirs.stops:
            generated[name] = theirs
        distance = runner.distance(runner.run(runner.model, head), theirs)
        detail, numbers, passed = f"{runner.unit} {distance:.3g}", {"distance": distance}, None
        if name == exact:
            limit = numbers["limit"] = max(ROUNDING, ROUNDING_FACTOR * runner.rounding(reference, theirs))
            detail, passed = f"{detail} from base + adapter run by PEFT; rounding allows {limit:.2g}", distance <= limit
        elif parents.base is not None and parents.is_added(name):
            base = numbers["base"] = runner.distance(runner.run(parents.base, head), theirs)
            detail, passed = f"{detail}, of the base {base:.3g}", distance <= base
        checks.append(Check("answers", name, passed, detail, numbers))
    if any(check.passed for check in checks):  # a merge may be bad for one task
        for check in checks:
            if check.passed is False:
                check.passed = True
                check.detail += ": the base is closer, which is fine because the result is closer to another model"
    return checks, generated


def _check_generation(ours: ModelRun, parents: Mapping[str, ModelRun]) -> Check:
    """Compare where generation stops, the tokens that stop it, and the chat template."""
    lost = set.intersection(*(one.ends for one in parents.values())) - ours.ends
    rows = [row for row in range(len(ours.stops)) if all(one.stops[row] for one in parents.values())]
    running = [row for row in rows if not ours.stops[row]]
    passed: bool | None = False
    if lost:
        detail = f"eos_token_id of generation_config lacks {', '.join(map(str, sorted(lost)))}, which stops every model"
    elif running:
        detail = f"{len(running)} of {len(rows)} texts do not stop, which stop with every model"
    elif all(one.has_template for one in parents.values()) and not ours.has_template:
        detail = "the chat template is missing, which every model has"
    else:
        passed = True if rows else None
        detail = f"{len(rows)} of {len(ours.stops)} texts stop with every model, and here"
    return Check("generation", ", ".join(parents), passed, detail)


@dataclass
class ModelRun:
    """What a model makes of the rows."""

    answers: list[Tensor]
    """Of every batch, logits or embeddings."""
    stops: list[bool] = field(default_factory=list)
    """For every prompt, whether the generated text ended before the limit. Empty if the model generates no text."""
    ends: set[int] = field(default_factory=set)
    """The tokens that end a text."""
    has_template: bool = False


class Runner:
    """Runs models on the same rows, one in memory at a time."""

    def __init__(self, model: str, parents: Parents, data: str | None, options: LoadOptions, bar: Progress) -> None:
        self.model, self.parents, self.data, self.options, self.bar = model, parents, data, options, bar
        bar.begin("running models", 1 + len(parents.models) + (parents.base is not None))
        module, self.info = empty_model(model, options["task"])
        self.module: Any = module
        """The model without its weights."""
        self.unit = "squared error" if self.info.task == "embedding" else "KL"
        self._length = options["max_length"] or min(LENGTH, num_positions(module) or LENGTH)
        self._how: dict[str, Any] = {name: options[name] for name in ("device", "model_args")} | {"dtype": "float32"}
        if self.info.task == "image" and data is None:
            batches: list[Any] = [self._noise()]
        else:
            with _prompts(data) as source:
                batches, _ = read_unlabeled(source, module, self.info, {**options, "max_length": self._length})
        self._batches = [moved(batch, device_of(options["device"])) for batch in batches]
        self._kept: dict[tuple[str, str | None], ModelRun] = {}

    def _noise(self) -> dict[str, Tensor]:
        """Random images."""
        edge = getattr(self.module.config, "image_size", None)
        if not isinstance(edge, int):
            raise InputError("there are no built-in images for this model. Give data")
        shape = (8, getattr(self.module.config, "num_channels", 3), edge, edge)
        return {"pixel_values": torch.randn(shape, generator=torch.Generator().manual_seed(0))}

    def run(self, reference: str, head: str | None = None, *, adapter: bool = False) -> ModelRun:
        """Load a model, with the head of another one or as an adapter that PEFT runs, and run it.

        The results of the model that is verified and of its base are kept.
        """
        if (reference, head) in self._kept:
            return self._kept[reference, head]
        module, _ = load_model(reference, self.info.task, head=head, merge_adapter=not adapter, **self._how)
        done = self._run(reference, module, generates=head is None and reference != self.parents.base)
        if reference in (self.model, self.parents.base):
            self._kept[reference, head] = done
        return done

    def _run(self, reference: str, module: Any, *, generates: bool) -> ModelRun:
        answers = []
        with torch.no_grad():
            for batch in self._batches:
                outputs = Outputs.of(unwrapped(module), batch)
                answers.append((outputs.representation if outputs.logits is None else outputs.logits).cpu())
        run = ModelRun(answers)
        if generates and self.info.task in ("causal-lm", "seq2seq"):
            self._generate(run, reference, module)
        self.bar.advance(1)
        return run

    def _generate(self, run: ModelRun, reference: str, module: Any) -> None:
        """Continue a few prompts with the model's own tokenizer, chat template and generation config."""
        info = locate(reference, self.info.task)
        run.has_template = load_tokenizer(info).chat_template is not None
        decoder_only, limit = info.task == "causal-lm", min(NEW_TOKENS, self._length // 2)
        with _prompts(self.data, chat=run.has_template and decoder_only) as source:
            options: Any = {**self.options, "limit": GENERATED_ROWS, "max_length": self._length - limit}
            loaded: Any = with_data(module, info, source, **options)
            ids = [prompt.ids for prompt in prompts(loaded, range(loaded.examples))]
        ends = module.generation_config.eos_token_id
        run.ends = set(ends if isinstance(ends, list | tuple) else [] if ends is None else [ends])
        settings: Any = {"do_sample": False, "num_beams": 1, "pad_token_id": loaded.data.pad_token}
        for prompt in ids:
            inputs = torch.tensor([prompt], device=loaded.device)
            with torch.no_grad(), quiet_transformers():
                text = module.generate(
                    input_ids=inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=limit, **settings
                )[0].tolist()
            new = text[len(prompt) if decoder_only else 1 :]
            run.stops.append(len(new) < limit or new[-1] in run.ends)

    def rounding(self, reference: str, run: ModelRun) -> float:
        """Return how much the answers of base + adapter change if the merged weights are stored in the model's type."""
        with open_checkpoint(self.model) as stored:
            types = {TORCH_TYPES[info.dtype] for info in stored.tensors.values()} & {torch.bfloat16, torch.float16}
        if not types:
            return 0.0
        module, _ = load_model(reference, self.info.task, **self._how)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(parameter.to(next(iter(types))).to(parameter.dtype))
        return self.distance(self._run(reference, module, generates=False), run)

    def distance(self, ours: ModelRun, theirs: ModelRun) -> float:
        """Return the mean KL between answers, in nats per row or token; for embeddings the relative squared error."""
        total, terms = 0.0, 0
        for a, b in zip(ours.answers, theirs.answers, strict=True):
            width = min(a.shape[-1], b.shape[-1])  # vocabularies may be padded differently
            a, b = a[..., :width], b[..., :width]
            if self.info.task == "embedding":
                values = (a - b).square().sum(-1) / b.square().sum(-1)
            else:
                values = answer_divergence(self.module, a, b)
            total, terms = total + float(values.double().sum()), terms + values.numel()
        return total / max(1, terms)

    def shares_head(self, reference: str) -> bool:
        """Return whether the model has the head of a fine-tuned model's task."""
        if self.info.task in ("causal-lm", "seq2seq", "embedding"):
            return True
        prefix = encoder_prefix(self.module)
        head = [name for name, _ in self.module.named_parameters() if not name.startswith(prefix)]
        if any(map(self.parents.excludes, head)):
            return False
        return same_head(self.module, [empty_model(reference, self.info.task)[0]])

    def difference(self, reference: str) -> str | None:
        """Return why the answers of a fine-tuned model cannot be compared; None if they can."""
        with open_checkpoint(self.model) as ours, open_checkpoint(reference, dequantize=True) as theirs:
            tokens = None if self.info.task == "image" else token_difference(ours, theirs)
        return None if tokens is None else f"another vocabulary: {tokens.lines[0]}"


@contextlib.contextmanager
def _prompts(data: str | None, *, chat: bool = False) -> Iterator[str]:
    """Yield the given data source, or a file with built-in prompts that every text task can read."""
    if data is not None:
        yield data
        return
    rows: list[dict[str, Any]] = [{"text": text, "target": text} for text in QUESTIONS]
    if chat:
        rows = [{"messages": [{"role": "user", "content": text}]} for text in QUESTIONS]
    with tempfile.TemporaryDirectory(prefix="gradmerge-") as folder:
        path = Path(folder) / "prompts.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
        yield str(path)
