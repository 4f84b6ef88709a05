"""What the seeds share, and one seed: the models, their curvature, the removals and what they do, stage by stage."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedModel

import gradmerge as gm
from gradmerge.tasks.models import model_with

from ..common import seeds
from ..common.data import IGNORED, Collate
from ..common.removal import Bench
from ..common.stages import run_stage, settings_hash, stage_seconds
from ..common.states import read_state
from ..common.training import Training, fine_tune
from . import removal
from .data import TAGS, Lengths, Turn, Turns, digest, encode, read_turns, swap_knowledge
from .evaluation import Likelihood, respond
from .metrics import Critic, text_metrics
from .pretraining import pretrain
from .removal import Removals
from .settings import Settings

SAMPLES = 3


@dataclass(frozen=True)
class Run(seeds.Run):
    settings: Settings
    turns: Turns
    start: Path
    """The model that every seed starts from."""
    start_facts: dict[str, Any]
    made_of: str
    """Hash of the settings of the model to start from."""


def prepare(out: Path, settings: Settings, device: str, data_dir: Path) -> Run:
    """Read the turns, and write the model that every seed starts from: given, or pre-trained on plain text."""
    turns = read_turns(data_dir, train=settings.train, validation=settings.validation, test=settings.test)

    def make(folder: Path) -> dict[str, Any]:
        if settings.model is not None:
            return _with_tags(folder, settings.model)
        assert settings.pretraining is not None
        return pretrain(folder, data_dir, turns.train, settings.pretraining, seed=0, device=device)

    given: dict[str, Any] = {"model": settings.model}
    if settings.pretraining is not None:
        given |= {"pretraining": asdict(settings.pretraining), "turns": digest(turns.train)}
    stage = out / "start" / "model"
    facts = run_stage(stage, make, given)
    return Run(out, settings, device, turns, stage / "model", facts, settings_hash(stage))


def _with_tags(folder: Path, name: str) -> dict[str, Any]:
    """Write a model of the Hub or a folder in float32, with tokens for the tags of a turn."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModelForSeq2SeqLM.from_pretrained(name, dtype=torch.float32)
    tokenizer.add_tokens(TAGS, special_tokens=True)
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return {"parameters": model.num_parameters(), "tokens": len(tokenizer)}


class Seed(seeds.Seed):
    run: Run
    settings: Settings

    def __init__(self, seed: int, run: Run) -> None:
        super().__init__(seed, run)
        self.tokenizer = AutoTokenizer.from_pretrained(run.start)
        self.collate = Collate(self.tokenizer.pad_token_id)
        turns, settings = run.turns, run.settings
        lengths = Lengths(settings.knowledge_tokens, settings.history_tokens, settings.response_tokens)
        swapped = swap_knowledge(turns.train, round((settings.swapped or 1.0) * len(turns.train)), seed)

        def rows(some: Sequence[Turn]) -> list[dict[str, list[int]]]:
            return encode(some, self.tokenizer, lengths)

        self.rows = {"true": rows(turns.train), "swapped": rows(swapped)}
        for split, held in (("validation", turns.validation), ("test", turns.test)):
            self.rows[split] = rows(held)
            self.rows[f"{split}, swapped"] = rows(swap_knowledge(held, len(held), seed))
        self.given = {
            "seed": seed,
            "start": run.made_of,
            "turns": digest([*turns.train, *swapped]),
            "lengths": asdict(lengths),
        }

    def results(self) -> dict[str, Any]:
        settings = self.settings
        mixed = [*self.rows["true"], *(self.rows["swapped"] if settings.swapped else [])]
        took = {"base": self._dialogue("base", mixed)}
        if settings.swapped:
            # The same batches in the same order, in which swapped turns do not count.
            ignored = [{**row, "labels": [IGNORED] * len(row["labels"])} for row in self.rows["swapped"]]
            took["target"] = self._dialogue("target", [*self.rows["true"], *ignored])
        found = {"seed": self.seed, "turns": {name: len(rows) for name, rows in self.rows.items()}, "training": took}
        if settings.comparing is not None:
            found["people"] = self._judged([turn.response for turn in self.run.turns.test])
            found["comparison"] = self.bench.results()
        if settings.paper:
            found |= self._paper_tables(took)
        return {**found, "seconds": stage_seconds(self.folder)}

    def _paper_tables(self, took: dict[str, Any]) -> dict[str, Any]:
        """The removals of the paper at many strengths and dampings; ``took`` gets the training of θ_t."""
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
            "curvature": sizes,
            "models": {
                name: {"validation": found, "test": test["models"][name]}
                for name, found in validation["models"].items()
            },
            "people": test["people"],
            "entries": validation["entries"],
        }

    @cached_property
    def bench(self) -> Bench:
        """Ways to take the swapped turns out, held against the target."""
        assert self.settings.comparing is not None
        likelihoods = {split: self._likelihood(split) for split in ("validation", "test")}

        def judged(model: PreTrainedModel) -> dict[str, Any]:
            return {**likelihoods["test"].measure(model), **self._judged(self._responses(model))}

        return Bench(
            self.folder,
            self.settings.comparing,
            self.seed,
            self.run.device,
            self.given,
            lambda name: self._load(self._folder(name)),
            self.rows["swapped"],
            self.rows["true"],
            self.collate,
            None,
            lambda model, split: likelihoods[split].measure(model),
            judged,
        )

    def _responses(self, model: PreTrainedModel) -> list[str]:
        rows, size = self.rows["test"], self.settings.generate_batch
        return respond(model, rows, self.tokenizer, self.collate, batch=size, **self._searched)

    @property
    def _searched(self) -> dict[str, int]:
        """How responses are looked for."""
        settings = self.settings
        return {
            "max_new_tokens": settings.new_tokens,
            "num_beams": settings.beams,
            "no_repeat_ngram_size": settings.no_repeat,
        }

    @cached_property
    def _critic(self) -> Critic | None:
        settings = self.settings
        return Critic(settings.critic, self.run.device, settings.critic_batch) if settings.critic else None

    def _judged(self, responses: Sequence[str]) -> dict[str, Any]:
        found: dict[str, Any] = text_metrics(self.run.turns.test, responses)
        if self._critic is not None:
            found["critic"] = self._critic(self.run.turns.test, responses)
        return {**found, "samples": list(responses[:SAMPLES])}

    def _folder(self, name: str) -> Path:
        return self.folder / name / "model"

    def _load(self, folder: Path) -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=torch.float32)
        return model.to(self.run.device).eval()

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
                model, rows, self.collate, folder, training, seed=self.seed, device=self.run.device, prior=prior()
            )
            model.save_pretrained(folder / "model")
            return took

        given = {**self.given, "training": asdict(training), "rows": len(rows)}
        result: dict[str, Any] = self.stage(name, make, settings=given, after=after)
        _free()
        return result

    def _dialogue(self, name: str, rows: Sequence[Any]) -> dict[str, Any]:
        """A dialogue model, trained on turns from the model that every seed starts from."""
        return self._trained(name, rows, self.settings.dialogue, after=[], start=self.run.start)

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
        result: dict[str, Any] = self.stage(name, make, settings=self.given, after=after)
        _free()
        return result

    def _read_curvature(self, name: str) -> gm.Curvature:
        return gm.Curvature.load(self.folder / name / "curvature")

    def _removals(self) -> Removals:
        base, tuned = (read_state(self._folder(name)) for name in ("base", "hallucinating"))
        measured = (self._read_curvature(f"{name}-curvature") for name in ("base", "hallucinating", "delta"))
        return Removals(self.settings, base, tuned, *measured)

    def _batches(self, rows: str) -> Iterator[dict[str, Tensor]]:
        ordered = sorted(self.rows[rows], key=lambda row: len(row["input_ids"]))
        size = self.settings.curvature_batch
        for start in range(0, len(ordered), size):
            yield self.collate(ordered[start : start + size])

    def _validation(self) -> dict[str, Any]:
        """Every removal on the validation turns, and the models as they are."""
        settings = self.settings

        def make(folder: Path) -> dict[str, Any]:
            removals = self._removals()
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
            "turns": digest(self.run.turns.validation),
            "settings": [settings.damping, settings.dampings, settings.strengths],
        }
        result: dict[str, Any] = self.stage("validation", make, settings=given, after=self._everything())
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

        def make(folder: Path) -> dict[str, Any]:
            removals = self._removals()
            likelihood = self._likelihood("test")
            model = self._load(self._folder("base"))

            def seen(model: PreTrainedModel) -> dict[str, Any]:
                return {**likelihood(model), **self._judged(self._responses(model))}

            return {
                "people": self._judged([turn.response for turn in self.run.turns.test]),
                "models": {name: seen(self._load(self._folder(name))) for name in validation["models"]},
                "entries": [
                    seen(model_with(model, removals.state(entry))) if place in shown else None
                    for place, entry in enumerate(entries)
                ],
            }

        given = {"turns": digest(self.run.turns.test), "how": self._searched, "shown": shown, "critic": settings.critic}
        result: dict[str, Any] = self.stage("test", make, settings=given, after=["validation"])
        _free()
        return result

    def _shown(self, validation: Mapping[str, Any]) -> list[int]:
        """The entries of the tables, and those of the figure: removal with the chosen damping at every strength."""
        settings, entries = self.settings, validation["entries"]
        tables = removal.rows(entries, validation["models"]["base"], settings.damping, settings.fluency)
        wanted = [entry for table in tables.values() for entry in table.values()]
        for method, chosen in tables["chosen"].items():
            wanted += [
                e for e in removal.of(entries, method, damping=chosen["damping"]) if e["strength"] in settings.answered
            ]
        return sorted({entries.index(entry) for entry in wanted})


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
