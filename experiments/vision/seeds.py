"""One seed: the base, a fine-tuned encoder for each task and for all, their curvature, and every merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm
from experiments.common.stages import Stages
from experiments.common.training import Training, fine_tune

from .data import Images, load_part
from .merging import accuracy, mean_entry, merged, merges
from .models import Classifier, clip_classifier, load_classifier, new_classifier, save_classifier
from .settings import Settings, epochs_on


def run_seed(
    seed: int, out: Path, settings: Settings, sets: Mapping[str, Any], size: int, model: str | None, device: str
) -> dict[str, Any]:
    """All results of a seed. ``sets`` is what is known of the data in ``out/data``."""
    return _Seed(seed, out, settings, sets, size, model, device).results()


class _Seed:
    def __init__(
        self, seed: int, out: Path, settings: Settings, sets: Mapping[str, Any], size: int, model: str | None, device: str
    ) -> None:  # fmt: skip
        self.seed, self.settings, self.sets, self.size, self.model, self.device = (
            seed,
            settings,
            sets,
            size,
            model,
            device,
        )
        self.data = out / "data"
        self.stages = Stages(out / f"seed-{seed}")
        self.numbers = {task: number for number, task in enumerate(settings.tasks)}

    def results(self) -> dict[str, Any]:
        run, settings, tasks = self.stages.run, self.settings, self.settings.tasks
        given = {"seed": self.seed, "data": self.sets, "size": self.size}
        how = {"pretraining": settings.pretraining and asdict(settings.pretraining), "encoder": settings.encoder}
        base = run("base", self._base, given=given | how | {"model": self.model, "rows": settings.base_rows})
        trained = {}
        for task in tasks:
            training = replace(settings.fine_tuning, epochs=epochs_on(settings, self.sets[task]["train"]))
            trained[task] = run(
                f"tuned-{task}",
                lambda folder, task=task, training=training: self._tuned(folder, [task], training),
                given=asdict(training),
                after=["base"],
            )
            run(
                f"curvature-{task}",
                lambda folder, task=task: self._curvature(folder, f"tuned-{task}", [task], None),
                after=[f"tuned-{task}"],
            )
        trained["joint"] = run(
            "joint",
            lambda folder: self._tuned(folder, tasks, settings.joint),
            given=asdict(settings.joint),
            after=["base"],
        )
        run(
            "curvature-base",
            lambda folder: self._curvature(folder, "base", tasks, settings.base_rows),
            given={"rows": settings.base_rows},
            after=["base"],
        )
        found = run(
            "merges",
            self._merges,
            given={"weights": settings.weights, "factors": settings.prior_factors},
            after=["joint", "curvature-base", *(f"curvature-{task}" for task in tasks)],
        )
        return {"base": base, "training": trained, **found, "seconds": self.stages.seconds()}

    def _images(self, tasks: Sequence[str], split: str, first: int | None = None) -> Images:
        return Images([load_part(self.data / task, self.numbers[task], split, first) for task in tasks], self.size)

    def _train(self, classifier: Classifier, images: Images, folder: Path, training: Training) -> dict[str, Any]:
        # Rows are numbers until the collator takes a whole batch of images at once.
        return fine_tune(
            classifier, range(len(images)), images.batch, folder, training, seed=self.seed, device=self.device
        )

    def _base(self, folder: Path) -> dict[str, Any]:
        tasks, settings = self.settings.tasks, self.settings
        torch.manual_seed(self.seed)
        report: dict[str, Any] = {}
        if settings.pretraining is None:
            assert self.model is not None
            classifier = clip_classifier(self.model, {task: self.sets[task]["classes"] for task in tasks})
        else:
            classifier = new_classifier(settings.encoder, [len(self.sets[task]["classes"]) for task in tasks])
            images = self._images(tasks, "train", settings.base_rows)
            report = self._train(classifier, images, folder, settings.pretraining)
        save_classifier(classifier, folder)
        return report | {"parameters": sum(p.numel() for p in classifier.encoder.parameters())}

    def _classifier(self) -> Classifier:
        return load_classifier(self.stages.path("base"), self.device)

    def _state(self, stage: str) -> dict[str, Tensor]:
        return load_file(self.stages.path(stage) / "encoder.safetensors")

    def _tuned(self, folder: Path, tasks: Sequence[str], training: Training) -> dict[str, Any]:
        classifier = self._classifier()
        base = classifier.state()
        report = self._train(classifier, self._images(tasks, "train"), folder, training)
        state = classifier.state()
        save_file(state, folder / "encoder.safetensors")
        squares = sum(float((state[n] - base[n]).double().square().sum()) for n in base)
        return report | {"moved_rms": (squares / sum(v.numel() for v in base.values())) ** 0.5}

    def _curvature(self, folder: Path, stage: str, tasks: Sequence[str], first: int | None) -> dict[str, Any]:
        """Σ_i [∇ℓ_i]² over the training rows, or over the first rows of every task."""
        classifier = self._classifier()
        classifier.put(self._state(stage))
        images = self._images(tasks, "train", first)
        found = gm.estimate_curvature(classifier, images.batches(self.settings.curvature_batch), device=self.device)
        found.save(folder / "curvature", force=True)
        return {"examples": found.examples, "mean_entry": mean_entry([found], "mean")}

    def _merges(self, folder: Path) -> dict[str, Any]:
        settings, tasks = self.settings, self.settings.tasks
        classifier = self._classifier()
        images = {split: {task: self._images([task], split) for task in tasks} for split in ("validation", "test")}

        def measured(state: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
            classifier.put(state)
            return {
                split: accuracy(classifier, sets, settings.evaluation_batch, self.device)
                for split, sets in images.items()
            }

        base, tuned = self._state("base"), [self._state(f"tuned-{task}") for task in tasks]
        references = {"base": measured(base), "joint": measured(self._state("joint"))}
        own = [measured(state) for state in tuned]
        references["individual"] = {
            split: {task: found[split][task] for task, found in zip(tasks, own, strict=True)} for split in images
        }
        curvature = [gm.Curvature.load(self.stages.path(f"curvature-{task}") / "curvature") for task in tasks]
        of_base = gm.Curvature.load(self.stages.path("curvature-base") / "curvature")
        fixed, curves = {}, {}
        for merge in merges(curvature, of_base, settings.weights, settings.prior_factors):
            points = [measured(merged(base, tuned, merge, weight)) for weight in merge.weights or (None,)]
            if merge.weights:
                curves[merge.name] = {
                    split: {task: [point[split][task] for point in points] for task in tasks} for split in images
                }
            else:
                fixed[merge.name] = points[0]
        return {
            "references": references,
            "fixed": fixed,
            "curves": curves,
            "scalar": {reduction: mean_entry(curvature, reduction) for reduction in ("mean", "sum")},
            "scalar_of_base": {reduction: mean_entry([of_base], reduction) for reduction in ("mean", "sum")},
        }
