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
from ..common.stages import run_stage, stage_seconds
from ..common.states import distance, read_state
from ..common.training import Training, fine_tune
from .data import Images, load_part, source_of, write_task
from .merging import LABELS, Measures, merged, merges, prior_scalar, scores
from .models import (
    Classifier,
    clip_classifier,
    fit_head,
    load_classifier,
    new_classifier,
    pretrained_classifier,
    save_classifier,
)
from .settings import HUB, Settings, epochs_on


@dataclass(frozen=True)
class Run(seeds.Run):
    settings: Settings
    model: str | None
    """The model that lends its encoder, of CLIP at full scale; None where one is pre-trained."""
    size: int
    """Of the images that the encoder takes."""
    sets: Mapping[str, Any]
    """What is known of each task's data in ``out/data``."""


def prepare(out: Path, settings: Settings, device: str, model: str | None, data_dir: Path | None) -> Run:
    """Write all data sets as arrays, from a folder or the Hub."""
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
        sets[task] = run_stage(
            out / "data" / task,
            lambda folder, source=source: write_task(source, folder, size, **how),
            {"source": source, "size": size, **how},
        )
    return Run(out, settings, device, model, size, sets)


def _image_size(model: str | None, settings: Settings) -> int:
    """Of the images as they are kept; an encoder may enlarge them."""
    if model is None:
        return int(settings.encoder["image_size"])
    wanted = "vit" if settings.encoder else "clip"
    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise gm.InputError(f"--model {model}: {str(error).splitlines()[0]}") from error
    if config.model_type != wanted:
        needed = "a vision transformer (vit)" if settings.encoder else "CLIP, whose text encoder makes the heads"
        raise gm.InputError(f"--model {model}: this is {config.model_type}, not {needed}")
    return int(settings.encoder["image_size"] if settings.encoder else config.vision_config.image_size)


class Seed(seeds.Seed):
    run: Run
    settings: Settings

    def __init__(self, seed: int, run: Run) -> None:
        super().__init__(seed, run)
        self.numbers = {task: number for number, task in enumerate(run.settings.tasks)}

    def results(self) -> dict[str, Any]:
        run, settings, tasks = self.stage, self.settings, self.settings.tasks
        trained = self.train()
        for labels in LABELS:
            self.measure(labels)
        for task in tasks:
            run(
                f"gram-{task}",
                lambda folder, task=task: self._gram(folder, task),
                settings={"rows": settings.curvature_rows},
                after=[f"tuned-{task}"],
            )
        found = run(
            "merges",
            self._merges,
            settings={
                "weights": settings.weights,
                "factors": settings.prior_factors,
                "reductions": settings.reductions,
            },
            after=[
                "joint",
                *(f"{labels}-{place}" for labels in LABELS for place in ("base", *tasks)),
                *(f"gram-{task}" for task in tasks),
            ],
        )
        base = trained.pop("base")
        return {"base": base, "training": trained, **found, "seconds": stage_seconds(self.folder)}

    def measure(self, labels: str) -> Measures:
        """The diagonal curvature of the base and of every task's model."""
        settings, tasks = self.settings, self.settings.tasks
        for place in tasks:
            self.stage(
                f"{labels}-{place}",
                lambda folder, place=place: self._curvature(
                    folder, f"tuned-{place}", [place], settings.curvature_rows, labels
                ),
                settings={"rows": settings.curvature_rows},
                after=[f"tuned-{place}"],
            )
        self.stage(
            f"{labels}-base",
            lambda folder: self._curvature(folder, "base", tasks, settings.base_rows, labels),
            settings={"rows": settings.base_rows},
            after=["base"],
        )
        return Measures(self._stored(labels, "base"), [self._stored(labels, task) for task in tasks])

    def train(self) -> dict[str, Any]:
        """The base, a model for every task and one for all together (`joint`); what is known of each training."""
        run, settings, tasks = self.stage, self.settings, self.settings.tasks
        of_base = {
            "seed": self.seed,
            "data": self.run.sets,
            "size": self.run.size,
            "pretraining": settings.pretraining and asdict(settings.pretraining),
            "encoder": settings.encoder,
            "model": self.run.model,
            "rows": settings.base_rows,
            "decay": settings.head_decay,
        }
        trained = {
            "base": run(
                "base",
                self._base,
                settings=of_base,
            )
        }
        for task in tasks:
            training = replace(settings.fine_tuning, epochs=epochs_on(settings, self.run.sets[task]["train"]))
            trained[task] = run(
                f"tuned-{task}",
                lambda folder, task=task, training=training: self._tuned(folder, [task], training),
                settings=asdict(training),
                after=["base"],
            )
        trained["joint"] = run(
            "joint",
            lambda folder: self._tuned(folder, tasks, settings.joint),
            settings=asdict(settings.joint),
            after=["base"],
        )
        return trained

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
        classes = [len(self.run.sets[task]["classes"]) for task in tasks]
        if settings.pretraining is not None:
            classifier = new_classifier(settings.encoder, classes)
            images = self._images(tasks, "train", settings.base_rows)
            report = self._train(classifier, images, folder, settings.pretraining)
        elif settings.encoder:
            assert self.run.model is not None
            classifier = pretrained_classifier(self.run.model, classes)
            self._fit_heads(classifier.to(self.run.device))
        else:
            assert self.run.model is not None
            classifier = clip_classifier(self.run.model, {task: self.run.sets[task]["classes"] for task in tasks})
        save_classifier(classifier, folder)
        return report | {"parameters": sum(p.numel() for p in classifier.encoder.parameters())}

    @torch.no_grad()
    def _fit_heads(self, classifier: Classifier) -> None:
        """A logistic regression for each task, on what the base makes of its training rows."""
        device, heads = self.run.device, classifier.heads
        classifier.eval()
        for number, task in enumerate(self.settings.tasks):
            images = self._images([task], "train")
            batches = list(images.batches(self.settings.evaluation_batch))
            features = torch.cat([classifier.features(batch["pixels"].to(device)) for batch in batches])
            labels = torch.cat([batch["labels"] for batch in batches]).to(device)
            classes = len(self.run.sets[task]["classes"])
            with torch.enable_grad():
                weight, bias = fit_head(features, labels, classes, self.settings.head_decay)
            heads.weight[number, :classes], heads.bias[number, :classes] = weight, bias

    def _classifier(self) -> Classifier:
        return load_classifier(self.folder / "base", self.run.device)

    def _state(self, stage: str) -> dict[str, Tensor]:
        return load_file(self.folder / stage / "encoder.safetensors")

    def _tuned(self, folder: Path, tasks: Sequence[str], training: Training) -> dict[str, Any]:
        classifier = self._classifier()
        base = classifier.state()
        report = self._train(classifier, self._images(tasks, "train"), folder, training)
        state = classifier.state()
        save_file(state, folder / "encoder.safetensors")
        entries = sum(value.numel() for value in base.values())
        return report | {"moved_rms": distance(state, base) / entries**0.5}

    def _curvature(
        self, folder: Path, stage: str, tasks: Sequence[str], first: int | None, labels: str
    ) -> dict[str, Any]:
        """Σ_i [∇ℓ_i]² over the training rows, or over the first rows of every task."""
        classifier = self._classifier()
        classifier.put(self._state(stage))
        images = self._images(tasks, "train", first)
        batches = images.batches(self.settings.curvature_batch)
        found = gm.estimate_curvature(classifier, batches, labels, device=self.run.device, progress=False)
        found.save(folder / "curvature", force=True)
        return {"examples": found.examples, "mean_entry": prior_scalar([found], "mean")}

    def _gram(self, folder: Path, task: str) -> dict[str, Any]:
        classifier = self._classifier()
        classifier.put(self._state(f"tuned-{task}"))
        batches = self._images([task], "train", self.settings.curvature_rows).batches(self.settings.curvature_batch)
        found = gm.estimate_curvature(classifier, batches, kind="gram", device=self.run.device, progress=False)
        found.save(folder / "gram", force=True)
        return {"examples": found.examples}

    def _merges(self, folder: Path) -> dict[str, Any]:
        settings, tasks = self.settings, self.settings.tasks
        classifier = self._classifier()
        images = {split: {task: self._images([task], split) for task in tasks} for split in ("validation", "test")}

        def measured(state: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
            """Accuracy on the rows of each split, and the mean loss of a test row."""
            classifier.put(state)
            found = {
                s: scores(classifier, sets, settings.evaluation_batch, self.run.device) for s, sets in images.items()
            }
            accuracies = {
                split: {task: one["accuracy"] for task, one in by_task.items()} for split, by_task in found.items()
            }
            return accuracies | {"loss": {task: one["loss"] for task, one in found["test"].items()}}

        base, tuned = self._state("base"), [self._state(f"tuned-{task}") for task in tasks]
        references = {"base": measured(base), "joint": measured(self._state("joint"))}
        own = [measured(state) for state in tuned]
        references["individual"] = {
            part: {task: found[part][task] for task, found in zip(tasks, own, strict=True)} for part in own[0]
        }
        measures = {labels: self.measure(labels) for labels in LABELS}
        grams = [
            gm.Curvature(
                read_state(self.folder / f"gram-{task}" / "gram"),
                min(self.run.sets[task]["train"], settings.curvature_rows or self.run.sets[task]["train"]),
                kind="gram",
            )
            for task in tasks
        ]
        of_base, curvature = measures["empirical"].base, measures["empirical"].tasks
        fixed, curves = {}, {}
        for merge in merges(measures, grams, settings.weights, settings.prior_factors, settings.reductions):
            points = [
                references["base"] if weight == 0 else measured(merged(base, tuned, merge, weight))
                for weight in merge.weights or (None,)
            ]
            if merge.weights:
                curves[merge.name] = {
                    part: {task: [point[part][task] for point in points] for task in tasks} for part in points[0]
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

    def _stored(self, labels: str, place: str) -> gm.Curvature:
        return gm.Curvature.load(self.folder / f"{labels}-{place}" / "curvature")
