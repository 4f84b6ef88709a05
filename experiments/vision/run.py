"""What the seeds share, and one seed: the base, encoders tuned on each task and on all, their curvature, merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

import gradmerge as gm

from ..common import seeds
from ..common.seeds import stages_in
from ..common.states import distance
from ..common.training import Training, fine_tune
from .data import Images, load_part, source_of, write_task
from .merging import accuracy, merged, merges, prior_scalar
from .models import Classifier, clip_classifier, load_classifier, new_classifier, save_classifier
from .settings import HUB, Settings, epochs_on


@dataclass(frozen=True)
class Run(seeds.Run):
    settings: Settings
    model: str | None
    """The CLIP model that lends its encoder; None where one is pre-trained."""
    size: int
    """Of the images that the encoder takes."""
    sets: Mapping[str, Any]
    """What is known of each task's data in ``out/data``."""


def prepare(out: Path, settings: Settings, device: str, model: str | None, data_dir: Path | None) -> Run:
    """Write all data sets as arrays, from a folder or the Hub."""
    stages = stages_in(out / "data")
    size = _image_size(model, settings)
    how = {
        "share": settings.validation_share,
        "most": settings.validation_most,
        "train_most": settings.train_most,
        "test_most": settings.test_most,
        "enlarge": settings.enlarge_first,
    }
    sets = {}
    for task in settings.tasks:
        source = source_of(task, data_dir, HUB.get(task))
        sets[task] = stages.run(
            task,
            lambda folder, source=source: write_task(source, folder, size, **how),
            given={"source": source, "size": size, **how},
        )
    return Run(out, settings, device, model, size, sets)


def _image_size(model: str | None, settings: Settings) -> int:
    if model is None:
        return int(settings.encoder["image_size"])
    config = AutoConfig.from_pretrained(model)
    if config.model_type != "clip":
        raise gm.InputError(
            f"--model {model}: this is {config.model_type}, not CLIP, whose text encoder makes the heads"
        )
    return int(config.vision_config.image_size)


class Seed(seeds.Seed):
    run: Run
    settings: Settings

    def __init__(self, seed: int, run: Run) -> None:
        super().__init__(seed, run)
        self.numbers = {task: number for number, task in enumerate(run.settings.tasks)}

    def results(self) -> dict[str, Any]:
        run, settings, tasks = self.stages.run, self.settings, self.settings.tasks
        given = {"seed": self.seed, "data": self.run.sets, "size": self.run.size}
        how = {"pretraining": settings.pretraining and asdict(settings.pretraining), "encoder": settings.encoder}
        base = run("base", self._base, given=given | how | {"model": self.run.model, "rows": settings.base_rows})
        trained = {}
        for task in tasks:
            training = replace(settings.fine_tuning, epochs=epochs_on(settings, self.run.sets[task]["train"]))
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
        data = self.run.out / "data"
        return Images([load_part(data / task, self.numbers[task], split, first) for task in tasks], self.run.size)

    def _train(self, classifier: Classifier, images: Images, folder: Path, training: Training) -> dict[str, Any]:
        # Rows are numbers until the collator takes a whole batch of images at once.
        return fine_tune(
            classifier, range(len(images)), images.batch, folder, training, seed=self.seed, device=self.run.device
        )

    def _base(self, folder: Path) -> dict[str, Any]:
        tasks, settings = self.settings.tasks, self.settings
        torch.manual_seed(self.seed)
        report: dict[str, Any] = {}
        if settings.pretraining is None:
            assert self.run.model is not None
            classifier = clip_classifier(self.run.model, {task: self.run.sets[task]["classes"] for task in tasks})
        else:
            classifier = new_classifier(settings.encoder, [len(self.run.sets[task]["classes"]) for task in tasks])
            images = self._images(tasks, "train", settings.base_rows)
            report = self._train(classifier, images, folder, settings.pretraining)
        save_classifier(classifier, folder)
        return report | {"parameters": sum(p.numel() for p in classifier.encoder.parameters())}

    def _classifier(self) -> Classifier:
        return load_classifier(self.stages.path("base"), self.run.device)

    def _state(self, stage: str) -> dict[str, Tensor]:
        return load_file(self.stages.path(stage) / "encoder.safetensors")

    def _tuned(self, folder: Path, tasks: Sequence[str], training: Training) -> dict[str, Any]:
        classifier = self._classifier()
        base = classifier.state()
        report = self._train(classifier, self._images(tasks, "train"), folder, training)
        state = classifier.state()
        save_file(state, folder / "encoder.safetensors")
        entries = sum(value.numel() for value in base.values())
        return report | {"moved_rms": distance(state, base) / entries**0.5}

    def _curvature(self, folder: Path, stage: str, tasks: Sequence[str], first: int | None) -> dict[str, Any]:
        """Σ_i [∇ℓ_i]² over the training rows, or over the first rows of every task."""
        classifier = self._classifier()
        classifier.put(self._state(stage))
        images = self._images(tasks, "train", first)
        found = gm.estimate_curvature(classifier, images.batches(self.settings.curvature_batch), device=self.run.device)
        found.save(folder / "curvature", force=True)
        return {"examples": found.examples, "mean_entry": prior_scalar([found], "mean")}

    def _merges(self, folder: Path) -> dict[str, Any]:
        settings, tasks = self.settings, self.settings.tasks
        classifier = self._classifier()
        images = {split: {task: self._images([task], split) for task in tasks} for split in ("validation", "test")}

        def measured(state: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
            classifier.put(state)
            return {
                split: accuracy(classifier, sets, settings.evaluation_batch, self.run.device)
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
            "scalar": {reduction: prior_scalar(curvature, reduction) for reduction in ("mean", "sum")},
            "scalar_of_base": {reduction: prior_scalar([of_base], reduction) for reduction in ("mean", "sum")},
        }
