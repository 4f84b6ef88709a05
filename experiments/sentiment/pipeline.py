"""One seed, from the pre-trained model to scores and mismatches, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, set_seed
from transformers.utils.logging import disable_progress_bar

import gradmerge as gm

from ..common.stages import Stages
from ..common.states import model_with, read_state
from ..common.training import fine_tune
from .data import BASE, SETS, TASKS
from .merging import RULES, SWEPT, Parts
from .models import Example, Kind, batches, distance, kind_of, mean_gradient, norm, score
from .settings import ALL_DATA, JOINT, Settings

#: The models that the merged ones are compared with: trained on everything, and on the tasks from the base.
TARGETS = (ALL_DATA, JOINT)


@dataclass(frozen=True)
class Run:
    """What the seeds share."""

    out: Path
    model: str
    data: Path
    rows: dict[str, dict[str, int]]
    digest: dict[str, Any]
    """What the data are made of: other data, other stages."""
    settings: Settings
    device: str


def run_seed(seed: int, run: Run) -> dict[str, Any]:
    """Everything that one seed gives; what has been done already is read from disk."""
    disable_progress_bar()
    return _Seed(seed, run).results()


class _Seed:
    def __init__(self, seed: int, run: Run) -> None:
        self._seed = seed
        self._run = run
        self._settings = run.settings
        self._stages = Stages(run.out / f"seed-{seed}")
        self._examples = cache(self._read)

    def results(self) -> dict[str, Any]:
        trained = {name: self._train(name) for name in (*SETS, *TARGETS)}
        self._measure()
        scores = {name: self._score(name, partial(self._state, name)) for name in (*SETS, *TARGETS)}
        scores |= {rule: self._score(rule, partial(self._merged, rule)) for rule in RULES}
        sweep = {method: [self._swept(method, weight, scores) for weight in self._settings.weights] for method in SWEPT}
        mismatch = {name: self._mismatch(name) for name in SETS}
        return {
            "seed": self._seed,
            "trained": trained,
            "scores": scores,
            "sweep": sweep,
            "mismatch": mismatch,
            "seconds": self._stages.seconds(),
        }

    @cached_property
    def _kind(self) -> Kind:
        return kind_of(self._run.model, self._settings.tokens)

    @cached_property
    def _template(self) -> PreTrainedModel:
        return self._kind.start(self._stages.path(BASE)).to(self._run.device)

    @cached_property
    def _parts(self) -> Parts:
        return Parts(
            models={name: self._stages.path(name) for name in SETS},
            curvatures={name: self._stages.path(f"curvature-{name}") / "curvature" for name in SETS},
            grams={name: self._stages.path(f"gram-{name}") / "gram" for name in SETS},
            rows={name: self._run.rows[name]["train"] for name in SETS},
            damping=self._settings.damping,
            density=self._settings.density,
        )

    def _merged(self, rule: str) -> dict[str, Tensor]:
        return self._parts.merged(rule)

    def _read(self, name: str, split: str) -> list[Example]:
        rows = gm.read_rows(str(self._run.data / name / f"{split}.jsonl.gz")).rows
        return self._kind.examples(rows)

    def _measured_on(self, name: str) -> list[Example]:
        return self._examples(name, "train")[: self._settings.curvature_examples]

    def _batches(self, examples: Sequence[Example]) -> Any:
        return batches(self._kind, examples, self._settings.batch_tokens)

    def _state(self, name: str) -> dict[str, Tensor]:
        return read_state(self._stages.path(name))

    def _train(self, name: str) -> dict[str, Any]:
        """The model of a data set or a target; all but the base and the all-data model begin at the base."""
        sets = {ALL_DATA: SETS, JOINT: TASKS}.get(name, (name,))
        training = self._settings.training(name)
        from_base = name not in (BASE, ALL_DATA)
        given = {
            "data": self._run.digest,
            "model": self._run.model,
            "tokens": self._settings.tokens,
            "training": asdict(training),
            "seed": self._seed,
            "sets": sets,
        }

        def make(folder: Path) -> dict[str, Any]:
            set_seed(self._seed)
            model = self._kind.start(self._stages.path(BASE) if from_base else self._run.model)
            rows = [example for each in sets for example in self._examples(each, "train")]
            found = fine_tune(
                model, rows, self._kind.collate, folder, training, seed=self._seed, device=self._run.device
            )
            model.save_pretrained(folder)
            return found

        found: dict[str, Any] = self._stages.run(name, make, given=given, after=[BASE] if from_base else ())
        return found

    def _measure(self) -> None:
        """Curvature and Gram matrices of each data set's model on the data it was trained on."""
        given = {"examples": self._settings.curvature_examples}
        for name in SETS:

            def curvature(folder: Path, name: str = name) -> int:
                model = model_with(self._template, self._state(name))
                found = gm.estimate_curvature(model, self._batches(self._measured_on(name)))
                found.save(folder / "curvature", force=True)
                return found.examples

            def gram(folder: Path, name: str = name) -> int:
                model = model_with(self._template, self._state(name))
                found = gm.estimate_gram(model, self._batches(self._measured_on(name)))
                found.save(folder / "gram", force=True)
                return found.examples

            self._stages.run(f"curvature-{name}", curvature, given=given, after=[name])
            self._stages.run(f"gram-{name}", gram, given=given, after=[name])

    def _merge_inputs(self) -> list[str]:
        return [*SETS, *(f"{what}-{name}" for what in ("curvature", "gram") for name in SETS)]

    def _score(self, name: str, state: Callable[[], dict[str, Tensor]]) -> dict[str, Any]:
        """Right labels of a model on the development and test rows of every data set."""
        trained = name in (*SETS, *TARGETS)
        given = {} if trained else {"damping": self._settings.damping, "density": self._settings.density}

        def make(folder: Path) -> dict[str, Any]:
            model = model_with(self._template, state())
            return {
                each: {
                    split: score(self._kind, model, self._examples(each, split), self._settings.batch_tokens)
                    for split in ("dev", "test")
                }
                for each in SETS
            }

        after = [name] if trained else self._merge_inputs()
        found: dict[str, Any] = self._stages.run(f"score-{name.replace(' ', '-')}", make, given=given, after=after)
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
        """‖∇ℓ_t(merged) − ∇ℓ_t(target)‖ of one data set's mean training loss, at weight 1, and the norm of each gradient."""

        def make(folder: Path) -> dict[str, Any]:
            examples, tokens = self._measured_on(name), self._settings.batch_tokens
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
        given = {"examples": self._settings.curvature_examples, "damping": self._settings.damping}
        found: dict[str, Any] = self._stages.run(f"mismatch-{name}", make, given=given, after=after)
        return found
