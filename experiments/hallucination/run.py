"""The stages: a model to start from, and for every seed the models, their curvature, the removals and what they do."""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import gradmerge as gm

from ..common.stages import Stages
from ..common.states import model_with, read_state
from ..common.training import Training, fine_tune
from . import choice
from .evaluation import Likelihood, respond
from .metrics import Critic, text_metrics
from .pretraining import pretrain
from .settings import Settings
from .turns import TAGS, Collate, Lengths, Turns, digest, encode, read_turns, swap_knowledge

State = Mapping[str, Tensor]
THREADS = 2
SAMPLES = 3


def all_turns(data: Path, settings: Settings) -> Turns:
    return read_turns(data, train=settings.train, validation=settings.validation, test=settings.test)


def prepare(out: Path, data: Path, settings: Settings, device: str) -> dict[str, Any]:
    """The model that every seed starts from: given, or made by pre-training on plain text. What it took."""
    disable_progress_bar()
    stages = Stages(out / "start")
    turns = all_turns(data, settings).train

    def make(folder: Path) -> dict[str, Any]:
        if settings.model is None:
            assert settings.pretraining is not None
            return pretrain(folder, data, turns, settings.pretraining, seed=0, device=device)
        tokenizer = AutoTokenizer.from_pretrained(settings.model)
        model = AutoModelForSeq2SeqLM.from_pretrained(settings.model, dtype=torch.float32)
        tokenizer.add_tokens(TAGS, special_tokens=True)
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
        return {"parameters": model.num_parameters(), "tokens": len(tokenizer)}

    given: dict[str, Any] = {"model": settings.model}
    if settings.pretraining is not None:
        given |= {"pretraining": asdict(settings.pretraining), "turns": digest(turns)}
    result: dict[str, Any] = stages.run("model", make, given=given)
    return {**result, "stage_seconds": stages.seconds()["model"]}


class Run:
    """One seed."""

    def __init__(self, seed: int, out: Path, data: Path, settings: Settings, device: str) -> None:
        self.seed, self.settings, self.device = seed, settings, device
        self.start = out / "start" / "model" / "model"
        self.stages = Stages(out / f"seed-{seed}")
        self.tokenizer = AutoTokenizer.from_pretrained(self.start)
        self.collate = Collate(self.tokenizer.pad_token_id)
        lengths = Lengths(settings.knowledge_tokens, settings.history_tokens, settings.response_tokens)
        self.turns = all_turns(data, settings)
        share = settings.swapped or 1.0
        self.swapped = swap_knowledge(self.turns.train, round(share * len(self.turns.train)), seed)
        elsewhere = {
            "validation": swap_knowledge(self.turns.validation, len(self.turns.validation), seed),
            "test": swap_knowledge(self.turns.test, len(self.turns.test), seed),
        }
        self.rows = {
            name: encode(turns, self.tokenizer, lengths)
            for name, turns in (
                ("true", self.turns.train),
                ("swapped", self.swapped),
                ("validation", self.turns.validation),
                ("validation, swapped", elsewhere["validation"]),
                ("test", self.turns.test),
                ("test, swapped", elsewhere["test"]),
            )
        }
        self.given = {
            "seed": seed,
            "start": json.loads((self.start.parent / "stage.json").read_text())["digest"],
            "turns": digest([*self.turns.train, *self.swapped]),
            "lengths": asdict(lengths),
        }

    def __call__(self) -> dict[str, Any]:
        settings = self.settings
        mixed = [*self.rows["true"], *(self.rows["swapped"] if settings.swapped else [])]
        took = {"base": self._trained("base", mixed, settings.dialogue, after=[], start=self.start)}
        if settings.swapped:
            took["target"] = self._trained("target", self.rows["true"], settings.dialogue, after=[], start=self.start)
        self._curvature("base-curvature", "base", "true")
        took["hallucinating"] = self._hallucinating()
        sizes = {
            "base": self._curvature("base-curvature", "base", "true"),
            "hallucinating": self._curvature("hallucinating-curvature", "hallucinating", "swapped"),
            "delta": self._curvature("delta-curvature", "hallucinating", "true", less="base"),
        }
        validation = self._validation()
        test = self._test(validation)
        for entry, found in zip(validation["entries"], test["entries"], strict=True):
            entry["test"] = found
        return {
            "seed": self.seed,
            "turns": {name: len(found) for name, found in self.rows.items()},
            "training": took,
            "curvature": sizes,
            "models": {
                name: {"validation": found, "test": test["models"][name]}
                for name, found in validation["models"].items()
            },
            "people": test["people"],
            "entries": validation["entries"],
            "seconds": self.stages.seconds(),
        }

    def _folder(self, name: str) -> Path:
        return self.stages.path(name) / "model"

    def _load(self, folder: Path) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(self.device).eval()

    def _trained(
        self,
        name: str,
        rows: Sequence[Any],
        training: Training,
        *,
        after: Sequence[str],
        start: Path,
        prior: Callable[[], Any] = lambda: "identity",
    ) -> dict[str, Any]:
        def make(folder: Path) -> dict[str, Any]:
            torch.manual_seed(self.seed)
            model = self._load(start).train()
            took = fine_tune(
                model, rows, self.collate, folder, training, seed=self.seed, device=self.device, prior=prior()
            )
            model.save_pretrained(folder / "model")
            return took

        given = {**self.given, "training": asdict(training), "rows": len(rows)}
        result: dict[str, Any] = self.stages.run(name, make, given=given, after=after)
        _free()
        return result

    def _hallucinating(self) -> dict[str, Any]:
        """The base trained on swapped turns, by default under ½‖θ − θ_0‖²_{F_0} for the sum of the losses.

        Training minimises the mean loss of a token, so the penalty is divided by the number of tokens.
        """
        training = self.settings.hallucinating
        if self.settings.penalty:
            tokens = sum(len(row["labels"]) for row in self.rows["swapped"])
            training = replace(training, strength=1 / tokens, coupling="adam")
        return self._trained(
            "hallucinating",
            self.rows["swapped"],
            training,
            after=["base", "base-curvature"],
            start=self._folder("base"),
            prior=lambda: self._read_curvature("base-curvature").sum(),
        )

    def _curvature(self, name: str, model: str, rows: str, less: str | None = None) -> dict[str, Any]:
        """Measured at a model, or at its difference to another (``less``); how large it is."""

        def make(folder: Path) -> dict[str, Any]:
            measured = self._load(self._folder(model))
            if less is not None:
                other = self._load(self._folder(less))
                with torch.no_grad():
                    for own, theirs in zip(measured.parameters(), other.parameters(), strict=True):
                        own -= theirs
            curvature = gm.estimate_curvature(measured, self._batches(rows))
            curvature.save(folder / "curvature")
            values = torch.cat([value.flatten().double().cpu() for value in curvature.values()])
            middle = values.kthvalue((len(values) + 1) // 2).values
            return {
                "examples": curvature.examples,
                "mean": float(values.mean()),
                "median": float(middle),
                "zero": float((values == 0).double().mean()),
            }

        after = [model] if less is None else [model, less]
        result: dict[str, Any] = self.stages.run(name, make, given=self.given, after=after)
        _free()
        return result

    def _read_curvature(self, name: str) -> gm.Curvature:
        return gm.Curvature.load(self.stages.path(name) / "curvature")

    def _batches(self, rows: str) -> Iterator[dict[str, Tensor]]:
        ordered = sorted(self.rows[rows], key=lambda row: len(row["input_ids"]))
        size = self.settings.curvature_batch
        for start in range(0, len(ordered), size):
            yield self.collate(ordered[start : start + size])

    def _validation(self) -> dict[str, Any]:
        """Every removal on the validation turns, and the models as they are."""
        settings = self.settings

        def make(folder: Path) -> dict[str, Any]:
            removals = Removals(self)
            likelihood = self._likelihood("validation")
            model = self._load(self._folder("base"))
            models = {
                name: likelihood(self._load(self._folder(name))) for name in ("base", *self._targets(), "hallucinating")
            }
            entries = []
            for setting in removals.settings():
                state = removals.state(setting)
                entries.append(
                    {**setting, "step": removals.step(state), "validation": likelihood(model_with(model, state))}
                )
            return {"models": models, "entries": entries}

        given = {
            "turns": digest(self.turns.validation),
            "settings": [settings.damping, settings.dampings, settings.strengths],
        }
        result: dict[str, Any] = self.stages.run("validation", make, given=given, after=self._everything())
        _free()
        return result

    def _targets(self) -> list[str]:
        return ["target"] if self.settings.swapped else []

    def _everything(self) -> list[str]:
        return [
            "base",
            *self._targets(),
            "base-curvature",
            "hallucinating",
            "hallucinating-curvature",
            "delta-curvature",
        ]

    def _likelihood(self, split: str) -> Likelihood:
        target = self._load(self._folder("target")) if self.settings.swapped else None
        own, swapped = self.rows[split], self.rows[f"{split}, swapped"]
        return Likelihood(own, swapped, self.collate, self.settings.evaluate_batch, target)

    def _test(self, validation: Mapping[str, Any]) -> dict[str, Any]:
        """Responses to the test turns by the removals that are shown, and by the models as they are."""
        settings = self.settings
        entries = validation["entries"]
        shown = self._shown(validation)
        how = {
            "max_new_tokens": settings.new_tokens,
            "num_beams": settings.beams,
            "no_repeat_ngram_size": settings.no_repeat,
        }

        def make(folder: Path) -> dict[str, Any]:
            removals = Removals(self)
            likelihood = self._likelihood("test")
            critic = Critic(settings.critic, self.device, settings.critic_batch) if settings.critic else None
            model = self._load(self._folder("base"))

            def judged(responses: Sequence[str]) -> dict[str, Any]:
                found: dict[str, Any] = text_metrics(self.turns.test, responses)
                if critic is not None:
                    found["critic"] = critic(self.turns.test, responses)
                return {**found, "samples": list(responses[:SAMPLES])}

            def seen(model: PreTrainedModel) -> dict[str, Any]:
                responses = respond(
                    model, self.rows["test"], self.tokenizer, self.collate, batch=settings.generate_batch, **how
                )
                return {**likelihood(model), **judged(responses)}

            return {
                "people": judged([turn.response for turn in self.turns.test]),
                "models": {name: seen(self._load(self._folder(name))) for name in validation["models"]},
                "entries": [
                    seen(model_with(model, removals.state(entry))) if place in shown else None
                    for place, entry in enumerate(entries)
                ],
            }

        given = {"turns": digest(self.turns.test), "how": how, "shown": shown, "critic": settings.critic}
        result: dict[str, Any] = self.stages.run("test", make, given=given, after=["validation"])
        _free()
        return result

    def _shown(self, validation: Mapping[str, Any]) -> list[int]:
        """The entries of the tables, and those of the figure: removal with the chosen damping at every strength."""
        settings, entries = self.settings, validation["entries"]
        tables = choice.rows(entries, validation["models"]["base"], settings.damping, settings.fluency)
        wanted = [entry for table in tables.values() for entry in table.values()]
        for method, chosen in tables["chosen"].items():
            wanted += [
                e for e in choice.of(entries, method, damping=chosen["damping"]) if e["strength"] in settings.answered
            ]
        return sorted({entries.index(entry) for entry in wanted})


class Removals:
    """The removals of one seed, formed in memory."""

    def __init__(self, run: Run) -> None:
        self._settings = run.settings
        self._base, self._tuned = (read_state(run._folder(name)) for name in ("base", "hallucinating"))
        self._rest, self._curvature, self._delta = (
            run._read_curvature(f"{name}-curvature") for name in ("base", "hallucinating", "delta")
        )
        entries = sum(value.numel() for value in self._curvature.values())
        mean = sum(float(value.sum(dtype=torch.float64)) for value in self._curvature.values()) / entries
        self._dampings = {run.settings.damping: None, **{times * mean: times for times in run.settings.dampings}}
        self._moved = self._length(self._tuned)

    def settings(self) -> list[dict[str, Any]]:
        """Every method at every strength; ``times`` is the damping in units of the mean entry of F_t, where it was given so."""
        only = {self._settings.damping: None}
        return [
            {"method": method, "damping": damping, "times": times, "strength": strength}
            for method, dampings in (("task-arithmetic", only), ("fa1", only), ("removal", self._dampings))
            for damping, times in dampings.items()
            for strength in self._settings.strengths
        ]

    def state(self, setting: Mapping[str, Any]) -> dict[str, Tensor]:
        """Removal by the rule of that name, or by task arithmetic or FA1 with a negative weight."""
        method, strength = setting["method"], setting["strength"]
        how: dict[str, Any] = {"weights": [-strength]}
        if method == "fa1":
            how |= {"prior": self._rest, "curvature": [self._delta], "damping": setting["damping"]}
        elif method == "removal":
            how = {
                "weights": [strength],
                "prior": self._rest,
                "curvature": [self._curvature],
                "damping": setting["damping"],
            }
        return gm.merge_state_dicts(self._base, [self._tuned], method, threads=THREADS, **how)

    def step(self, state: State) -> float:
        """‖θ̂ − θ_0‖ / ‖θ_t − θ_0‖."""
        return self._length(state) / self._moved

    def _length(self, state: State) -> float:
        return math.sqrt(sum(float((state[n] - v).double().square().sum()) for n, v in self._base.items()))


def run_seed(seed: int, out: Path, data: Path, settings: Settings, device: str) -> dict[str, Any]:
    """All that one seed gives."""
    disable_progress_bar()
    return Run(seed, out, data, settings, device)()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
