"""What the seeds share, and one seed from the pre-trained model to scores and mismatches, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, set_seed

import gradmerge as gm
from gradmerge.tasks.models import model_with

from ..common import seeds
from ..common.data import evenly, folder_in
from ..common.stages import run_stage, stage_seconds
from ..common.states import distance, norm, read_state
from ..common.training import fine_tune
from . import grid
from .data import BASE, SETS, TASKS, Row, from_files, from_hub, local_files, write_splits
from .made_up import made_up, make_encoder
from .merging import RULES, SWEPT, Parts
from .models import Example, Kind, batches, kind_of, mean_gradient, prepared, score
from .pretraining import base_without, pretrain
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
    """Settings of the data, and of a model that is pre-trained here."""
    pretrained: dict[str, Any] | None = None
    """What pre-training took, where it was done here."""


def prepare(out: Path, settings: Settings, device: str, model: str | None, source: Path | str) -> Run:
    """Write the data, and where ``model`` is None a model: pre-trained if the settings say how, else random.

    ``source`` of the data is a folder, "hub" or "made up".
    """
    data, start = out / "data", out / "model"
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
    rows = run_stage(data, lambda folder: write_splits(folder, {name: read(name) for name in SETS}, **cuts), given)
    pretrained = None
    if settings.pretraining is not None:
        how = settings.pretraining
        given = {**given, "pretraining": asdict(how)}
        folders = [(data if name in SETS else folder_in(Path(source), "text")) / name for name in how.texts]
        make = partial(pretrain, texts=folders, settings=how, seed=0, device=device)
        pretrained = run_stage(start, make, given, after=["data"])
        same = {"tokens": settings.tokens, "training": asdict(settings.training(BASE))}
        without = partial(base_without, model=start, data=data, settings=settings, seed=0, device=device)
        pretrained["base without"] = run_stage(out / "base-without", without, same, after=["model"])
    elif model is None:
        run_stage(start, lambda folder: make_encoder(folder, texts()), after=["data"])
    return Run(out, settings, device, model or str(start), data, rows, given, pretrained)


class Seed(seeds.Seed):
    run: Run
    settings: Settings

    def __init__(self, seed: int, run: Run) -> None:
        super().__init__(seed, run)
        self._examples, self._prepared = cache(self._read), cache(self._prepare)

    def results(self) -> dict[str, Any]:
        trained = {name: self._train(name) for name in (*SETS, *TARGETS)}
        for name in SETS:
            self._estimate(name)
            self._gram(name)
        scores = {name: self._score_trained(name) for name in (*SETS, *TARGETS)}
        scores |= {rule: self._score(rule, partial(self._parts.merged, rule)) for rule in RULES}
        sweep = {method: [self._swept(method, weight, scores) for weight in self.settings.weights] for method in SWEPT}
        mismatch = {name: self._mismatch(name) for name in SETS}
        more = {"grid": self._grid()} if self.settings.grid else {}
        return {
            "seed": self.seed,
            "trained": trained,
            "scores": scores,
            "sweep": sweep,
            "mismatch": mismatch,
            **more,
            "seconds": stage_seconds(self.folder),
        }

    @cached_property
    def _kind(self) -> Kind:
        return kind_of(self.run.model, self.settings.tokens)

    @cached_property
    def _template(self) -> PreTrainedModel:
        return self._kind.start(self.folder / BASE).to(self.run.device)

    @cached_property
    def _parts(self) -> Parts:
        return Parts(
            models={name: self.folder / name for name in SETS},
            curvatures={name: self.folder / f"curvature-{name}" / "curvature" for name in SETS},
            grams={name: self.folder / f"gram-{name}" / "gram" for name in SETS},
            rows={name: self.run.rows[name]["train"] for name in SETS},
            damping=self.settings.damping,
            density=self.settings.density,
        )

    def _read(self, name: str, split: str) -> list[Example]:
        rows = gm.read_rows(str(self.run.data / name / f"{split}.jsonl.gz")).rows
        return self._kind.examples(rows)

    def _prepare(self, name: str, split: str) -> list[tuple[dict[str, Tensor], Tensor]]:
        """What models are scored on, where they are: many are."""
        return prepared(self._kind, self._examples(name, split), self.settings.batch_tokens, self.run.device)

    def _measured_on(self, name: str, sample: bool = False) -> list[Example]:
        rows = self._examples(name, "train")
        # Spread over the set, as some are sorted by label.
        return evenly(rows, self.settings.sample_rows) if sample else rows[: self.settings.curvature_examples]

    def _batches(self, examples: Sequence[Example]) -> Any:
        return batches(self._kind, examples, self.settings.batch_tokens)

    def _state(self, name: str) -> dict[str, Tensor]:
        return read_state(self.folder / name)

    def _train(self, name: str, tuning: str = "plain") -> dict[str, Any]:
        """The model of a data set or a target; all but the base and the all-data model begin at the base.

        Tuned under the prior, a task's loss, the mean over its N rows, has the penalty of the method divided by N.
        """
        sets = {ALL_DATA: SETS, JOINT: TASKS}.get(name, (name,))
        training = self.settings.training(name)
        from_base, after = name not in (BASE, ALL_DATA), [BASE]
        if tuning == "prior":
            training = replace(training, strength=1 / self.run.rows[name]["train"], coupling="adam")
            after.append(self._estimate(BASE))
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
            model = self._kind.start(self.folder / BASE if from_base else self.run.model)
            rows = [example for each in sets for example in self._examples(each, "train")]
            how: dict[str, Any] = {"seed": self.seed, "device": self.run.device}
            if training.strength:
                prior = self.estimated(BASE)
                how["prior"] = prior.scale(self.run.rows[BASE]["train"] / prior.examples).sum()
            found = fine_tune(model, rows, self._kind.collate, folder, training, **how)
            model.save_pretrained(folder)
            return found

        stage = grid.model_name(name, tuning)
        found: dict[str, Any] = self.stage(stage, make, settings=given, after=after if from_base else ())
        return found

    def _gram(self, name: str) -> None:
        """Gram matrices of a data set's model on the data it was trained on."""

        def make(folder: Path) -> int:
            found = gm.estimate_curvature(self._module(name), self._batches(self._measured_on(name)), kind="gram")
            found.save(folder / "gram", force=True)
            return int(found.examples)

        self.stage(f"gram-{name}", make, settings={"examples": self.settings.curvature_examples}, after=[name])

    def _module(self, stage: str) -> PreTrainedModel:
        model: PreTrainedModel = model_with(self._template, self._state(stage))
        return model

    def _estimate(self, model: str, *, labels: str = "empirical", kind: str = "diagonal", sample: bool = False) -> str:
        """The stage with the curvature of a model, by its stage, on its own training rows, or on a sample of them."""
        words = [kind] * (kind != "diagonal") + [labels] * (labels != "empirical") + ["of-few"] * sample
        stage = "-".join(["curvature", *words, model])
        (data,) = (name for name in SETS if model in (name, grid.model_name(name, "prior")))

        def make(folder: Path) -> int:
            batches = self._batches(self._measured_on(data, sample))
            found = gm.estimate_curvature(self._module(model), batches, labels, kind=kind, progress=False)
            found.save(folder / "curvature", force=True)
            return int(found.examples)

        rows = self.settings.sample_rows if sample else self.settings.curvature_examples
        self.stage(stage, make, settings={"examples": rows}, after=[model])
        return stage

    def estimated(self, model: str, **how: Any) -> Any:
        """The curvature of a model; ``how`` as in ``_estimate``."""
        return gm.Curvature.load(self.folder / self._estimate(model, **how) / "curvature")

    def _grid(self) -> dict[str, Any]:
        """Every cell's score; and of the models that were tuned under the prior, how, and theirs."""
        trained = {task: self._train(task, "prior") for task in TASKS}
        models = {task: self._score_trained(grid.model_name(task, "prior")) for task in TASKS}
        cells = [{**asdict(cell), "score": self._cell(cell)} for cell in grid.cells()]
        return {"trained": trained, "models": models, "cells": cells}

    def _cell(self, cell: grid.Cell) -> dict[str, Any]:
        after = [BASE, *cell.models, *(self._estimate(**one) for one in cell.measured)]

        def state() -> dict[str, Tensor]:
            measured = [self.estimated(**one) for one in cell.measured]
            rows = {name: self.run.rows[name]["train"] for name in SETS}
            how = {"threads": 2, "device": self.run.device}
            return grid.merged(cell, self._state, measured, rows, self.settings.damping, **how)

        return self._score(cell.name, state, after=after, given={"damping": self.settings.damping})

    def _merge_inputs(self) -> list[str]:
        return [*SETS, *(f"{what}-{name}" for what in ("curvature", "gram") for name in SETS)]

    def _score_trained(self, stage: str) -> dict[str, Any]:
        return self._score(stage, partial(self._state, stage), after=[stage], given={})

    def _score(
        self,
        name: str,
        state: Callable[[], dict[str, Tensor]],
        *,
        after: Sequence[str] | None = None,
        given: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Right labels of a model on the development and test rows of every data set; by default of a merge."""
        if given is None:
            given = {"damping": self.settings.damping, "density": self.settings.density}

        def make(folder: Path) -> dict[str, Any]:
            model = model_with(self._template, state())
            return {each: {split: self.scored(model, each, split) for split in ("dev", "test")} for each in SETS}

        after = self._merge_inputs() if after is None else after
        found: dict[str, Any] = self.stage(f"score-{name.replace(' ', '-')}", make, settings=given, after=after)
        return found

    def scored(self, model: PreTrainedModel, name: str, split: str) -> dict[str, Any]:
        return score(self._kind, model, self._prepared(name, split))

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
        found: dict[str, Any] = self.stage(f"mismatch-{name}", make, settings=given, after=after)
        return found
