"""One seed of the sentiment experiment: training, curvature, merges, scores and gradient mismatches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, set_seed

import gradmerge as gm

from ..common.data import Collate, evenly, sizes_of
from ..common.driver import Experiment, Run, Seed, run_stage, stage_seconds
from ..common.states import distance, norm, put, read_state
from ..common.training import fine_tune
from .data import read_local, write_splits
from .made_up import made_up, make_encoder
from .merges import MERGES, SWEPT, Merge, grid, merge_models, swept
from .report import REPORT
from .settings import ALL_DATA, BASE, JOINT, SCALES, SETS, SOURCES, TARGETS, TASKS

DESCRIPTION = """\
Merge four sentiment tasks into a model of IMDB (the paper's tables of sentiment and of Hessians).

A pre-trained encoder is fine-tuned on IMDB (the base), the base on Yelp, Rotten Tomatoes, SST-2 and Amazon, and these
are merged by every method. They are compared with a model trained on all five data sets and with one trained on the
four from the base. DIR has NAME/{train,dev,test}.jsonl.gz with text and label for imdb, yelp, rotten_tomatoes, sst2 and
amazon; dev may be missing. --scale tiny makes up data and model.

  python -m experiments.sentiment --model minilm-l6 --data-dir DIR --seeds 0,1,2 --grid
"""


def prepare(run: Run) -> dict[str, Any]:
    """Write the data, and at the tiny scale a random model."""
    settings, data, start = run.settings, run.out / "data", run.out / "model"
    cuts = [settings.dev_rows, settings.train_rows, settings.test_rows]

    def make(folder: Path) -> Any:
        sets = {name: made_up(name) for name in SETS} if run.data_dir is None else read_local(run.data_dir)
        return write_splits(folder, sets, settings)

    rows = run_stage(data, make, [sizes_of(run.data_dir), cuts])
    if run.model is None:
        texts = [row["text"] for name in SETS for row in read(data, name, "train")]
        run_stage(start, lambda folder: make_encoder(folder, texts), after=["data"])
    return {"rows": rows, "model": run.model or str(start), "sizes": sizes_of(run.data_dir), "cuts": cuts}


def read(data: Path, name: str, split: str) -> Sequence[Mapping[str, Any]]:
    return gm.read_rows(str(data / name / f"{split}.jsonl.gz")).rows


class SentimentSeed(Seed):
    """The models, merges and scores of one seed."""

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__(run, seed)
        self.rows = {name: counts["train"] for name, counts in run.shared["rows"].items()}
        self.tokenizer = AutoTokenizer.from_pretrained(run.shared["model"])
        self.collate = Collate(self.tokenizer.pad_token_id)
        # Examples, the batches that models are scored on, and weights are needed many times.
        self.examples, self.test_batches, self.state = map(cache, (self._examples, self._test_batches, self._state))

    def results(self) -> dict[str, Any]:
        models = (*SETS, *TARGETS)
        trained = {name: self._train(name) for name in models}
        scores = {name: self._score(f"score-{name}", partial(self.state, name), [name]) for name in models}
        scores |= {name: self._score_merge(merge) for name, merge in MERGES.items()}
        weights = self.settings.weights
        # At weight 0 both methods return the base.
        sweep = {
            method: [self._score_merge(swept(method, weight)) if weight else scores[BASE] for weight in weights]
            for method in SWEPT
        }
        found = {"seed": self.seed, "trained": trained, "scores": scores, "sweep": sweep}
        found["mismatch"] = {name: self._mismatch(name) for name in SETS}
        if self.settings.grid:
            found["grid"] = {"cells": [{**_cell(merge), "score": self._score_merge(merge)} for merge in grid()]}
        return {**found, "seconds": stage_seconds(self.folder)}

    def _examples(self, name: str, split: str) -> list[dict[str, Any]]:
        rows = read(self.run.out / "data", name, split)
        texts = [row["text"] for row in rows]
        ids = self.tokenizer(texts, truncation=True, max_length=self.settings.tokens)["input_ids"]
        return [{"input_ids": text, "labels": int(row["label"])} for text, row in zip(ids, rows, strict=True)]

    def _test_batches(self, name: str, split: str) -> list[dict[str, Tensor]]:
        return [self._moved(batch) for batch in self._batches(self.examples(name, split))]

    def _batches(self, examples: Sequence[Any]) -> Any:
        return self.collate.batches(examples, self.settings.evaluation_batch)

    def _moved(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.run.device) for name, value in batch.items()}

    def _state(self, name: str) -> dict[str, Tensor]:
        return read_state(self.folder / name)

    def _model(self, state: Mapping[str, Tensor] | None = None, path: Path | str | None = None) -> Any:
        """Load a model of this experiment, by default the base, and give it other weights."""
        path = path or self.folder / BASE
        model = AutoModelForSequenceClassification.from_pretrained(path, num_labels=2, dtype=torch.float32)
        return (model if state is None else put(model, state)).to(self.run.device).eval()

    def _train(self, name: str) -> dict[str, Any]:
        """Train the model of a data set or a target; all but the base and the all-data model start from the base."""
        sets = {ALL_DATA: SETS, JOINT: TASKS}.get(name, (name,))
        training, from_base = self.settings.training(name), name not in (BASE, ALL_DATA)

        def make(folder: Path) -> dict[str, Any]:
            set_seed(self.seed)
            model = self._model(path=self.folder / BASE if from_base else self.run.shared["model"])
            rows = [example for each in sets for example in self.examples(each, "train")]
            how = {"seed": self.seed, "device": self.run.device}
            found = fine_tune(model.train(), rows, self.collate, folder, training, **how)
            model.save_pretrained(folder)
            return found

        given = {**self.run.shared, "tokens": self.settings.tokens, "training": asdict(training), "seed": self.seed}
        found: dict[str, Any] = self.stage(name, make, {**given, "sets": sets}, [BASE] if from_base else [])
        return found

    def _measured_on(self, name: str, sample: bool = False) -> Sequence[Any]:
        rows = self.examples(name, "train")
        return evenly(rows, self.settings.sample_rows) if sample else rows[: self.settings.curvature_examples]

    def _estimate(self, name: str, kind: str, labels: str, sample: bool) -> str:
        """Return the stage with the curvature of a data set's model on its own training rows."""
        stage = f"{kind}-{labels}{'-of-sample' if sample else ''}-{name}"

        def make(folder: Path) -> int:
            batches = self._batches(self._measured_on(name, sample))
            model = self._model(self.state(name))
            found = gm.estimate_curvature(model, batches, labels, kind=kind, progress=False)
            found.save(folder / "curvature", force=True)
            return int(found.examples)

        rows = self.settings.sample_rows if sample else self.settings.curvature_examples
        self.stage(stage, make, {"examples": rows}, [name])
        return stage

    def curvature(self, name: str, **measured: Any) -> Any:
        """Return the curvature, or for RegMean the Gram matrices, of a data set's model."""
        folder = self.folder / self._estimate(name, **measured) / "curvature"
        return read_state(folder) if measured["kind"] == "gram" else gm.Curvature.load(folder)

    def merged(self, merge: Merge) -> dict[str, Tensor]:
        """Return the weights of a merge."""
        states = {name: self.state(name) for name in SETS}
        return merge_models(merge, states, self.curvature, self.rows, self.settings.damping, self.settings.density)

    def _merge_inputs(self, merge: Merge) -> list[str]:
        measured = merge.curvature not in ("", "identity")
        return [*SETS, *(self._estimate(name, **merge.measured) for name in SETS if measured)]

    def _score_merge(self, merge: Merge) -> dict[str, Any]:
        return self._score(f"score-{merge.stage}", partial(self.merged, merge), self._merge_inputs(merge))

    def _score(self, stage: str, state: Callable[[], Mapping[str, Tensor]], after: Sequence[str]) -> dict[str, Any]:
        """Return data set → split → number of right labels, rows and mean loss."""

        def make(folder: Path) -> dict[str, Any]:
            model = self._model(state())
            return {name: {split: self._right(model, name, split) for split in ("dev", "test")} for name in SETS}

        given = [self.settings.damping, self.settings.density]
        found: dict[str, Any] = self.stage(stage, make, given, after)
        return found

    @torch.inference_mode()
    def _right(self, model: Any, name: str, split: str) -> dict[str, Any]:
        right, loss, rows = 0, 0.0, 0
        for batch in self.test_batches(name, split):
            found = model(**batch)
            count = len(batch["labels"])
            right += int((found.logits.argmax(-1) == batch["labels"]).sum())
            loss, rows = loss + float(found.loss) * count, rows + count
        return {"right": right, "rows": rows, "loss": loss / rows}

    def _mismatch(self, name: str) -> dict[str, Any]:
        """Return ‖∇ℓ(merged) − ∇ℓ(target)‖ of a data set's mean training loss, at weight 1."""

        def make(folder: Path) -> dict[str, Any]:
            states = {target: partial(self.state, target) for target in TARGETS}
            states |= {method: partial(self.merged, swept(method, 1.0)) for method in SWEPT}
            gradients = {each: self._gradient(self._model(state()), name) for each, state in states.items()}
            return {
                "norm": {each: norm(gradient) for each, gradient in gradients.items()},
                "distance": {
                    method: {target: distance(gradients[method], gradients[target]) for target in TARGETS}
                    for method in SWEPT
                },
            }

        after = [*TARGETS, *dict.fromkeys(s for method in SWEPT for s in self._merge_inputs(swept(method, 1.0)))]
        given = [self.settings.curvature_examples, self.settings.damping]
        found: dict[str, Any] = self.stage(f"mismatch-{name}", make, given, after)
        return found

    def _gradient(self, model: Any, name: str) -> dict[str, Tensor]:
        """Return the gradient of the mean training loss of a data set, without dropout."""
        examples = self._measured_on(name)
        for batch in self._batches(examples):
            (model(**self._moved(batch)).loss * (len(batch["labels"]) / len(examples))).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _cell(merge: Merge) -> dict[str, str]:
    found = asdict(merge)
    return {"tuning": "plain", **{key: found[key] for key in ("curvature", "labels", "reduction", "penalty")}}


EXPERIMENT = Experiment(
    "sentiment",
    DESCRIPTION,
    SCALES,
    SentimentSeed,
    REPORT,
    prepare,
    facts=lambda run, seeds: {"rows": run.shared["rows"]},
    sources=SOURCES,
    options={"grid": {"action": "store_true", "help": "also merge with every kind of curvature"}},
    adjust=lambda args, settings: replace(settings, grid=args.grid),
    needs={"small": ("model", "data-dir")},
)
