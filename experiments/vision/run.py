"""One seed of the vision experiment: the base, encoders fine-tuned on each task and on all, curvature and merges."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradmerge as gm

from ..common.data import sizes_of
from ..common.driver import Experiment, Run, Seed, run_stage, stage_seconds
from ..common.states import State, distance, mean_entry, put, read_state
from ..common.training import Training, fine_tune, half_precision
from .data import Images, write_task
from .models import Classifier, fit_head, load_classifier, new_classifier, pretrained_classifier
from .report import REPORT
from .settings import PRETRAINED, SCALES, SOURCES, Settings

DESCRIPTION = """\
Merge eight image tasks into a vision transformer (left panel of the paper's figure over scaling factors).

The encoder is fine-tuned on each of eight data sets with a fixed head for each, and the encoders are merged. DIR, or
DIR/images, has NAME.npz with x_train, y_train, x_test and y_test for mnist, fashion_mnist, kmnist, notmnist, usps,
gtsrb, cifar10 and intel_scenes. A small transformer is pre-trained on 1,000 rows of each. With --model, a pre-trained
vision transformer is the base, and heads are logistic regressions from its features.

  python -m experiments.vision --data-dir DIR --seeds 0,1,2
  python -m experiments.vision --model deit-tiny --data-dir DIR --seeds 0,1,2 -o runs/vision-deit
"""
#: The labels of the gradients: the data's, or sampled from the model, as the authors' code does.
LABELS = ("empirical", "sampled")
#: Methods whose weight is a scale of the merged difference.
SCALED = ("ties", "tsv", "iso-c")


@dataclass(frozen=True)
class Merge:
    """A merge at every weight, or without ``weights`` one merge."""

    name: str
    method: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    weights: Sequence[float] = ()


def settings_of(args: argparse.Namespace, settings: Settings) -> Settings:
    if args.model is None or args.scale == "full":
        return settings
    if args.scale == "tiny":
        raise gm.InputError("--scale tiny makes its own model: leave --model out")
    return PRETRAINED


def prepare(run: Run) -> dict[str, dict[str, int]]:
    """Write all data sets as arrays; return task → number of classes and rows."""
    settings, found = run.settings, {}
    given = [sizes_of(run.data_dir), settings.image_size, settings.validation_share]
    given += [settings.train_most, settings.test_most]
    for task in settings.tasks:

        def make(folder: Path, task: str = task) -> dict[str, int]:
            assert run.data_dir is not None
            return write_task(task, run.data_dir, folder, settings)

        found[task] = run_stage(run.out / "data" / task, make, given)
    return found


class VisionSeed(Seed):
    """The models and merges of one seed."""

    def results(self) -> dict[str, Any]:
        tasks, settings = self.settings.tasks, self.settings
        base = self.stage("base", self._base, self._base_settings())
        trained = {}
        for name, some in (*((task, [task]) for task in tasks), ("joint", tasks)):
            make = lambda folder, some=some: self._fine_tuned(folder, some)  # noqa: E731
            trained[name] = self.stage(f"tuned-{name}", make, asdict(settings.fine_tuning), ["base"])
        stages = [self._estimate(kind, labels, name) for name in ("base", *tasks) for kind, labels in self._kinds(name)]
        given = [settings.weights, settings.prior_factors]
        found = self.stage("merges", lambda folder: self._merges(), given, ["tuned-joint", *stages])
        return {"base": base, "training": trained, **found, "seconds": stage_seconds(self.folder)}

    def _base_settings(self) -> dict[str, Any]:
        settings = self.settings
        names = ("pretraining", "encoder", "base_rows", "head_decay")
        return {"seed": self.seed, "data": self.run.shared, "model": self.run.model} | {
            name: asdict(settings)[name] for name in names
        }

    def _images(self, tasks: Sequence[str], split: str, first: int | None = None) -> Images:
        numbered = [(self.settings.tasks.index(task), task) for task in tasks]
        return Images(self.run.out / "data", numbered, split, first)

    def _train(self, model: Classifier, images: Images, folder: Path, training: Training) -> dict[str, Any]:
        # Rows are numbers until the collator reads a whole batch of images at once.
        how = {"seed": self.seed, "device": self.run.device}
        return fine_tune(model, range(len(images)), images.batch, folder, training, **how)

    def _base(self, folder: Path) -> dict[str, Any]:
        """Pre-train a small transformer, or fit heads to a pre-trained one."""
        settings = self.settings
        torch.manual_seed(self.seed)
        report: dict[str, Any] = {}
        classes = [self.run.shared[task]["classes"] for task in settings.tasks]
        if settings.pretraining is not None:
            classifier = new_classifier(settings.encoder, classes)
            images = self._images(settings.tasks, "train", settings.base_rows)
            report = self._train(classifier, images, folder, settings.pretraining)
        else:
            assert self.run.model is not None
            classifier = pretrained_classifier(self.run.model, classes).to(self.run.device).eval()
            for number, task in enumerate(settings.tasks):
                self._fit_head(classifier, number, task)
        classifier.save(folder)
        return report | {"parameters": sum(p.numel() for p in classifier.encoder.parameters())}

    @torch.no_grad()
    def _fit_head(self, classifier: Classifier, number: int, task: str) -> None:
        batches = list(self._images([task], "train").batches(self.settings.evaluation_batch))
        features = torch.cat([classifier.features(batch["pixels"].to(self.run.device)) for batch in batches])
        labels = torch.cat([batch["labels"] for batch in batches]).to(self.run.device)
        classes = self.run.shared[task]["classes"]
        with torch.enable_grad():
            weight, bias = fit_head(features, labels, classes, self.settings.head_decay)
        classifier.heads.weight[number, :classes], classifier.heads.bias[number, :classes] = weight, bias

    def _state(self, name: str) -> dict[str, Tensor]:
        folder = "base" if name == "base" else f"tuned-{name}"
        return load_file(self.folder / folder / "encoder.safetensors")

    def _classifier(self, name: str = "base") -> Classifier:
        return load_classifier(self.folder / "base", self._state(name), self.run.device)

    def _fine_tuned(self, folder: Path, tasks: Sequence[str]) -> dict[str, Any]:
        classifier = self._classifier()
        base = classifier.state()
        report = self._train(classifier, self._images(tasks, "train"), folder, self.settings.fine_tuning)
        state = classifier.state()
        save_file(state, folder / "encoder.safetensors")
        entries = sum(value.numel() for value in base.values())
        return report | {"moved_rms": distance(state, base) / entries**0.5}

    def _kinds(self, name: str) -> list[tuple[str, str]]:
        """Return kinds and labels of what is measured of a model."""
        diagonals = [("diagonal", labels) for labels in LABELS]
        return diagonals if name == "base" else [*diagonals, ("gram", "empirical")]

    def _estimate(self, kind: str, labels: str, name: str) -> str:
        """Measure a model on its training rows, the base on the first rows of every task; return the stage."""
        settings, stage = self.settings, f"{kind}-{labels}-{name}"
        tasks, first = ([name], settings.curvature_rows) if name != "base" else (settings.tasks, settings.base_rows)

        def make(folder: Path) -> dict[str, Any]:
            batches = self._images(tasks, "train", first).batches(settings.curvature_batch)
            found = gm.estimate_curvature(self._classifier(name), batches, labels, kind=kind, progress=False)
            found.save(folder / "curvature", force=True)
            return {"examples": found.examples}

        self.stage(stage, make, {"rows": first}, ["base" if name == "base" else f"tuned-{name}"])
        return stage

    def _curvature(self, labels: str, name: str) -> gm.Curvature:
        return gm.Curvature.load(self.folder / f"diagonal-{labels}-{name}" / "curvature")

    def _gram(self, name: str) -> gm.Curvature:
        rows = self.run.shared[name]["train"]
        state = read_state(self.folder / f"gram-empirical-{name}" / "curvature")
        return gm.Curvature(state, min(rows, self.settings.curvature_rows or rows), kind="gram")

    def merges(self) -> Iterator[Merge]:
        """Yield every merge that is compared."""
        tasks, weights, matching = self.settings.tasks, self.settings.weights, "gradient-matching"
        yield Merge("average", "average")
        yield Merge("regmean", "regmean", {"curvature": [self._gram(task) for task in tasks]})
        for method in ("task-arithmetic", *SCALED):
            yield Merge(method, method, weights=weights)
        for labels in LABELS:
            kind = "" if labels == "empirical" else ", sampled labels"
            measured = {"curvature": [self._curvature(labels, task) for task in tasks], "reduction": "mean"}
            c, base = mean_of(measured["curvature"]), {"prior": self._curvature(labels, "base")}
            yield Merge(f"fisher-averaging, mean{kind}", "fisher-averaging", measured)
            yield Merge(f"{matching}{kind}", matching, measured | {"prior": c}, weights)
            name = f"{matching}, Fisher of the base"
            yield Merge(f"{name}{kind}", matching, measured | base, weights)
            yield Merge(f"{name}, no penalty{kind}", matching, measured | base | {"penalty": "none"}, weights)
            for factor in self.settings.prior_factors if labels == "empirical" else ():
                yield Merge(f"{matching}, {factor:g} · c", matching, measured | {"prior": factor * c}, weights)

    def _merges(self) -> dict[str, Any]:
        tasks, classifier = self.settings.tasks, self._classifier()
        images = {split: {task: self._images([task], split) for task in tasks} for split in ("validation", "test")}

        def measured(state: State) -> dict[str, dict[str, float]]:
            """Return accuracy on the rows of each split, and the mean loss of a test row, by task."""
            put(classifier, state)
            found = {s: {t: self._score(classifier, one) for t, one in sets.items()} for s, sets in images.items()}
            accuracies = {split: {task: one[0] for task, one in by.items()} for split, by in found.items()}
            return accuracies | {"loss": {task: one[1] for task, one in found["test"].items()}}

        base, tuned = self._state("base"), [self._state(task) for task in tasks]
        references = {"base": measured(base), "joint": measured(self._state("joint"))}
        own = [measured(state) for state in tuned]
        references["individual"] = {
            part: {task: found[part][task] for task, found in zip(tasks, own, strict=True)} for part in own[0]
        }
        fixed, curves = {}, {}
        for merge in self.merges():
            if not merge.weights:
                fixed[merge.name] = measured(_merged(base, tuned, merge, None))
                continue
            points = [measured(_merged(base, tuned, merge, w)) if w else references["base"] for w in merge.weights]
            curves[merge.name] = {
                part: {task: [point[part][task] for point in points] for task in tasks} for part in points[0]
            }
        scalars = [mean_of([self._curvature("empirical", n) for n in names]) for names in (tasks, ["base"])]
        return {
            "references": references,
            "fixed": fixed,
            "curves": curves,
            "scalar": {"mean": scalars[0]},
            "scalar_of_base": {"mean": scalars[1]},
        }

    @torch.no_grad()
    def _score(self, classifier: Classifier, images: Images) -> tuple[float, float]:
        """Return the percentage of images that are classified correctly, and their mean loss in nats."""
        classifier.eval()
        right, loss = 0, 0.0
        for batch in images.batches(self.settings.evaluation_batch):
            batch = {name: value.to(self.run.device) for name, value in batch.items()}
            with half_precision(batch["labels"].device):
                logits = classifier(batch["pixels"], batch["task"]).float()
            right += int((logits.argmax(1) == batch["labels"]).sum())
            loss += float(F.cross_entropy(logits, batch["labels"], reduction="sum"))
        return 100 * right / len(images), loss / len(images)


def mean_of(curvature: Sequence[gm.Curvature]) -> float:
    """Return c, the mean over tasks and parameters of the averaged squared gradients.

    c · I is the identity with the trace of the tasks' mean curvature, so that the base counts as much as one task.
    """
    return sum(mean_entry(one) / one.examples for one in curvature) / len(curvature)


def _merged(base: State, tuned: Sequence[State], merge: Merge, weight: float | None) -> dict[str, Tensor]:
    arguments = dict(merge.arguments)
    if weight is not None:
        arguments |= {"options": {"scale": weight}} if merge.method in SCALED else {"weights": [weight] * len(tuned)}
    return gm.merge_state_dicts(base, tuned, merge.method, threads=2, **arguments)


EXPERIMENT = Experiment(
    "vision",
    DESCRIPTION,
    SCALES,
    VisionSeed,
    REPORT,
    prepare,
    facts=lambda run, seeds: {"data": run.shared},
    sources=SOURCES,
    adjust=settings_of,
    needs={"small": ("data-dir",), "tiny": ("data-dir",)},
)
