"""What the seeds share, and one seed from the pre-trained model to scores and mismatches, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, set_seed

import gradmerge as gm
from gradmerge.tasks.models import model_with

from ..common import seeds
from ..common.seeds import stages_in
from ..common.states import distance, norm, read_state
from ..common.training import fine_tune
from .data import BASE, SETS, TASKS, Row, from_files, from_hub, local_files, write_splits
from .made_up import made_up, make_encoder
from .merging import RULES, SWEPT, Parts
from .models import Example, Kind, batches, kind_of, mean_gradient, score
from .settings import ALL_DATA, JOINT, Settings

#: The models that the merged ones are compared with: trained on everything, and on the tasks from the base.
TARGETS = (ALL_DATA, JOINT)


@dataclass(frozen=True)
class Run(seeds.Run):
    settings: Settings
    model: str
    data: Path
    rows: dict[str, dict[str, int]]
    """How many rows each split has."""
    made_of: dict[str, Any]
    """What the data are made of: other data, other stages."""


def prepare(out: Path, settings: Settings, device: str, model: str | None, source: Path | str) -> Run:
    """Write the data, and where ``model`` is None a model with random weights.

    ``source`` of the data is a folder, "hub" or "made up".
    """
    stages = stages_in(out)
    data = stages.path("data")
    cuts = {"dev_rows": settings.dev_rows, "train_rows": settings.train_rows, "test_rows": settings.test_rows}
    files = local_files(source) if isinstance(source, Path) else {}

    def read(name: str) -> dict[str, list[Row]]:
        if files:
            return from_files(files[name])
        return from_hub(name, settings.dev_rows) if source == "hub" else made_up(name)

    def texts() -> list[str]:
        return [row["text"] for name in SETS for row in gm.read_rows(str(data / name / "train.jsonl.gz")).rows]

    sizes = {name: {split: path.stat().st_size for split, path in splits.items()} for name, splits in files.items()}
    given = {"source": sizes or source, **cuts}
    rows = stages.run(
        "data", lambda folder: write_splits(folder, {name: read(name) for name in SETS}, **cuts), given=given
    )
    if model is None:
        stages.run("model", lambda folder: make_encoder(folder, texts()), after=["data"])
        model = str(stages.path("model"))
    return Run(out, settings, device, model, data, rows, given)


class Seed(seeds.Seed):
    run: Run
    settings: Settings

    def __init__(self, seed: int, run: Run) -> None:
        super().__init__(seed, run)
        self._examples = cache(self._read)

    def results(self) -> dict[str, Any]:
        trained = {name: self._train(name) for name in (*SETS, *TARGETS)}
        self._measure()
        scores = {name: self._score(name, partial(self._state, name)) for name in (*SETS, *TARGETS)}
        scores |= {rule: self._score(rule, partial(self._parts.merged, rule)) for rule in RULES}
        sweep = {method: [self._swept(method, weight, scores) for weight in self.settings.weights] for method in SWEPT}
        mismatch = {name: self._mismatch(name) for name in SETS}
        return {
            "seed": self.seed,
            "trained": trained,
            "scores": scores,
            "sweep": sweep,
            "mismatch": mismatch,
            "seconds": self.stages.seconds(),
        }

    @cached_property
    def _kind(self) -> Kind:
        return kind_of(self.run.model, self.settings.tokens)

    @cached_property
    def _template(self) -> PreTrainedModel:
        return self._kind.start(self.stages.path(BASE)).to(self.run.device)

    @cached_property
    def _parts(self) -> Parts:
        return Parts(
            models={name: self.stages.path(name) for name in SETS},
            curvatures={name: self.stages.path(f"curvature-{name}") / "curvature" for name in SETS},
            grams={name: self.stages.path(f"gram-{name}") / "gram" for name in SETS},
            rows={name: self.run.rows[name]["train"] for name in SETS},
            damping=self.settings.damping,
            density=self.settings.density,
        )

    def _read(self, name: str, split: str) -> list[Example]:
        rows = gm.read_rows(str(self.run.data / name / f"{split}.jsonl.gz")).rows
        return self._kind.examples(rows)

    def _measured_on(self, name: str) -> list[Example]:
        return self._examples(name, "train")[: self.settings.curvature_examples]

    def _batches(self, examples: Sequence[Example]) -> Any:
        return batches(self._kind, examples, self.settings.batch_tokens)

    def _state(self, name: str) -> dict[str, Tensor]:
        return read_state(self.stages.path(name))

    def _train(self, name: str) -> dict[str, Any]:
        """The model of a data set or a target; all but the base and the all-data model begin at the base."""
        sets = {ALL_DATA: SETS, JOINT: TASKS}.get(name, (name,))
        training = self.settings.training(name)
        from_base = name not in (BASE, ALL_DATA)
        given = {
            "data": self.run.made_of,
            "model": self.run.model,
            "tokens": self.settings.tokens,
            "training": asdict(training),
            "seed": self.seed,
            "sets": sets,
        }

        def make(folder: Path) -> dict[str, Any]:
            set_seed(self.seed)
            model = self._kind.start(self.stages.path(BASE) if from_base else self.run.model)
            rows = [example for each in sets for example in self._examples(each, "train")]
            found = fine_tune(model, rows, self._kind.collate, folder, training, seed=self.seed, device=self.run.device)
            model.save_pretrained(folder)
            return found

        found: dict[str, Any] = self.stages.run(name, make, given=given, after=[BASE] if from_base else ())
        return found

    def _measure(self) -> None:
        """Curvature and Gram matrices of each data set's model on the data it was trained on."""
        given = {"examples": self.settings.curvature_examples}
        for name in SETS:
            for what, estimate in (("curvature", gm.estimate_curvature), ("gram", gm.estimate_gram)):

                def make(folder: Path, name: str = name, what: str = what, estimate: Any = estimate) -> int:
                    model = model_with(self._template, self._state(name))
                    found = estimate(model, self._batches(self._measured_on(name)))
                    found.save(folder / what, force=True)
                    return int(found.examples)

                self.stages.run(f"{what}-{name}", make, given=given, after=[name])

    def _merge_inputs(self) -> list[str]:
        return [*SETS, *(f"{what}-{name}" for what in ("curvature", "gram") for name in SETS)]

    def _score(self, name: str, state: Callable[[], dict[str, Tensor]]) -> dict[str, Any]:
        """Right labels of a model on the development and test rows of every data set."""
        trained = name in (*SETS, *TARGETS)
        given = {} if trained else {"damping": self.settings.damping, "density": self.settings.density}

        def make(folder: Path) -> dict[str, Any]:
            model = model_with(self._template, state())
            return {
                each: {
                    split: score(self._kind, model, self._examples(each, split), self.settings.batch_tokens)
                    for split in ("dev", "test")
                }
                for each in SETS
            }

        after = [name] if trained else self._merge_inputs()
        found: dict[str, Any] = self.stages.run(f"score-{name.replace(' ', '-')}", make, given=given, after=after)
        return found

    def _swept(self, method: str, weight: float, scores: dict[str, Any]) -> dict[str, Any]:
        if weight == 0:
            return scores[BASE]  # both rules give the base itself
        return self._score(f"{method}-{weight:g}", lambda: self._parts.swept(method, weight))

    @cached_property
    def _compared(self) -> dict[str, PreTrainedModel]:
        """The targets, and both merges at weight 1."""
        states = {target: partial(self._state, target) for target in TARGETS}
        states |= {method: partial(self._parts.swept, method, 1.0) for method in SWEPT}
        return {name: model_with(self._template, state()) for name, state in states.items()}

    def _mismatch(self, name: str) -> dict[str, Any]:
        """‖∇ℓ_t(merged) − ∇ℓ_t(target)‖ of a data set's mean training loss, at weight 1, and the gradients' norms."""

        def make(folder: Path) -> dict[str, Any]:
            examples, tokens = self._measured_on(name), self.settings.batch_tokens
            gradients = {
                each: mean_gradient(self._kind, model, examples, tokens) for each, model in self._compared.items()
            }
            return {
                "norm": {each: norm(gradient) for each, gradient in gradients.items()},
                "distance": {
                    method: {target: distance(gradients[method], gradients[target]) for target in TARGETS}
                    for method in SWEPT
                },
            }

        after = [*self._merge_inputs(), *TARGETS]
        given = {"examples": self.settings.curvature_examples, "damping": self.settings.damping}
        found: dict[str, Any] = self.stages.run(f"mismatch-{name}", make, given=given, after=after)
        return found
