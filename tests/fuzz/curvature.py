"""Kinds of input with curvature in them: its files, what a Trainer leaves, and unfinished work that is gone on with."""

from __future__ import annotations

import contextlib
import io
import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import gradmerge as gm
from gradmerge.api.estimating import estimate_curvature
from gradmerge.curvature.files import open_curvature
from gradmerge.curvature.summary import pieces, summarize
from gradmerge.engine.journal import NAME as JOURNAL
from tests.making import random_curvature, random_state, weight_bytes

from .models import SHAPES, Merging, recipe, write_models
from .mutate import (
    WRONG,
    mutate_bytes,
    mutate_file,
    mutate_json_file,
    mutate_numbers,
    mutate_torch,
    split,
    with_length,
)
from .trial import Broken, Kind, command, files_in


class CurvatureFiles(Merging):
    """A curvature file of any precision: its bytes, its header, its metadata, its numbers."""

    name, share = "curvature", 10.0

    def make(self) -> None:
        write_models(curvature=True)
        self.saved: dict[str, bytes] = {}
        for precision in ("float32", "bfloat16", "log8"):
            random_curvature(0, random_state(0, SHAPES)).save(Path(precision), precision=precision)
            self.saved[precision] = (Path(precision) / "curvature.safetensors").read_bytes()

    def run(self, rng: random.Random | None) -> None:
        precision = rng.choice(list(self.saved)) if rng else "log8"
        if rng is not None:
            change = rng.choice([mutate_file, mutate_file, mutate_metadata, mutate_numbers])
            self.place.put(f"{precision}/curvature.safetensors", change(self.saved[precision], rng))
        way = rng.randrange(20) if rng else 2
        if way == 0:
            command("curvature", "show", precision, *(["--json"] if rng and rng.random() < 0.5 else []))
        elif way == 1:
            gm.Curvature.load(precision)
        else:
            with open_curvature(precision) as file:
                for group in summarize(pieces(file)):
                    if not group.total >= 0:
                        raise Broken(f"a sum of {group.total}")
        models: list[Any] = [{"model": "a", "curvature": precision}, "b"]
        method = rng.choice(["gradient-matching", "fisher-averaging"]) if rng else "gradient-matching"
        self.merge_recipe(recipe(method=method, models=models, missing="zero"))


def mutate_metadata(raw: bytes, rng: random.Random) -> bytes:
    header, data = split(raw)
    values = [w for w in WRONG if isinstance(w, str)] + [
        "0",
        "-1",
        "1e9",
        "9" * 18,
        "9" * 19,
        "١",
        "3.5",
        "gram",
        "diagonal",
        "log8",
        "[",
        '["a"]',
        "5",
    ]
    key = rng.choice([*header["__metadata__"], "kind", "fan_in_fan_out"])
    header["__metadata__"][key] = rng.choice(values)
    return with_length(json.dumps(header).encode("utf-8", "surrogatepass"), data)


class Grams(Merging):
    """Gram matrices, for RegMean."""

    name, share = "gram", 4.0

    def make(self) -> None:
        write_models()
        header = {"format": "gradmerge-curvature/1", "examples": "3", "kind": "gram", "fan_in_fan_out": "[]"}
        save_file({"a.weight": torch.eye(3), "b.weight": torch.eye(4)}, "gram.safetensors", metadata=header)

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            change = rng.choice([mutate_file, mutate_file, mutate_metadata, mutate_numbers])
            self.place.put("gram.safetensors", change(self.place.original("gram.safetensors"), rng))
        models = [{"model": "a", "curvature": "gram.safetensors"}, {"model": "b", "curvature": "gram.safetensors"}]
        self.merge_recipe(recipe(method="regmean", models=models))


class Reports(Kind):
    """Curvature and recipes as `preview` and `diagnose` read them."""

    name, share = "reports", 1.0

    def make(self) -> None:
        write_models(curvature=True)
        recipe_text = json.dumps(recipe(method="gradient-matching", models=["a", {"model": "b", "weight": 0.5}]))
        Path("recipe.yml").write_text(recipe_text)

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            name = f"{rng.choice(['a', 'base', 'b'])}/curvature/curvature.safetensors"
            change = rng.choice([mutate_file, mutate_metadata, mutate_numbers, mutate_numbers])
            self.place.put(name, change(self.place.original(name), rng))
        if rng is None or rng.random() < 0.5:
            gm.preview("recipe.yml", self.place.out, weights=["0:1:0.5"], threads=1)
        else:
            gm.diagnose("recipe.yml", self.place.out, threads=1)

    def check(self, outcome: str) -> None:
        left = sorted(path.name for path in self.place.out.parent.iterdir())
        if left != (["out"] if outcome == "worked" else []):
            raise Broken(f"left behind: {', '.join(left) or 'nothing'}")
        for path in self.place.out.glob("*.json"):
            json.loads(path.read_text("utf-8"))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.b(self.norm(self.a(x)))
        return result


class TrainerCheckpoints(Kind):
    """What the Trainer leaves, as `curvature import` reads it."""

    name, share = "trainer-checkpoint", 10.0

    def make(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.states: dict[str, Any] = {}
        for kind in ("adam", "named", "ivon"):
            self.states[kind] = self._state(kind)
        save_file(self.model.state_dict(), "model.safetensors")
        torch.save(self.states["adam"], "optimizer.pt")

    def _state(self, kind: str) -> dict[str, Any]:
        parameters: Any = list(self.model.parameters())
        if kind == "ivon":
            numbers = sum(p.numel() for p in parameters)
            group = {"params": list(range(len(parameters))), "hess": torch.ones(numbers), "ess": 100.0, "lr": 0.1}
            return {"state": {}, "param_groups": [group]}
        if kind == "named":
            parameters = list(self.model.named_parameters())
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        self.model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return dict(optimizer.state_dict())

    def run(self, rng: random.Random | None) -> None:
        kind = rng.randrange(10) if rng else 10
        if rng is not None and kind <= 8:
            state = self.states[rng.choice(list(self.states))]
            file = io.BytesIO()
            zipped = rng.random() < 0.7
            torch.save(state, file, _use_new_zipfile_serialization=zipped)
            self.place.put("optimizer.pt", mutate_torch(state, file.getvalue(), rng, zipped))
        elif rng is not None:
            self.place.put(rng.choice(["adapter_config.json", "optimizer.bin"]), b"x")
        curvature = gm.import_curvature(".", 24, 8, model=self.model)
        curvature.save(self.place.out, precision=rng.choice(["float32", "log8", "bfloat16"]) if rng else "float32")

    def check(self, outcome: str) -> None:
        left = sorted(path.name for path in self.place.out.parent.iterdir())
        if left != (["out"] if outcome == "worked" else []):
            raise Broken(f"left behind: {', '.join(left) or 'nothing'}")
        if outcome == "worked":
            gm.Curvature.load(self.place.out)


class Unfinished(Merging):
    """A merge that was stopped: its journal, or the files beside it, changed before it goes on."""

    name, share = "journal", 5.0

    def make(self) -> None:
        write_models()
        self.given = recipe(method="ties", options={"density": 0.5})
        gm.merge(self.given, self.place.out, threads=1, block=8)
        self.whole = weight_bytes(self.place.out)
        self.place.clear_out()
        stop = _Stop("merging", 400)
        with contextlib.suppress(KeyboardInterrupt):
            gm.merge(self.given, self.place.out, threads=1, block=8, progress=stop)
        self.left = files_in(self.place.out.parent)
        self.journal = next(path for path in self.left if path.name == JOURNAL)

    def run(self, rng: random.Random | None) -> None:
        left = dict(self.left)
        if rng is not None:
            change = mutate_bytes if rng.random() < 0.5 else mutate_lines
            left[self.journal] = change(left[self.journal], rng)
            if rng.random() < 0.05:
                name = rng.choice([p for p in left if p.suffix == ".safetensors"])
                left[name] = left[name][: rng.randrange(len(left[name]))]
        self.place.prepare(left)
        gm.merge(self.given, self.place.out, threads=1, block=8, resume=True)

    def check(self, outcome: str) -> None:
        if outcome == "worked" and weight_bytes(self.place.out) != self.whole:
            raise Broken("another result than that of an undisturbed merge")
        if outcome != "worked" and self.place.out.exists():
            raise Broken("there is a result of a merge that failed")


class _Stop:
    """A progress that ends the work after so many bytes or examples of it, but not while thresholds are measured."""

    def __init__(self, what: str, most: int) -> None:
        self.what, self.left = what, most

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.counts = what == self.what

    def advance(self, amount: int) -> None:
        self.left -= amount if self.counts else 0
        if self.left < 0:
            raise KeyboardInterrupt


def mutate_lines(raw: bytes, rng: random.Random) -> bytes:
    """Lines of JSON, all but the first with a checksum, of which one is changed."""
    lines = raw.splitlines()
    number = rng.randrange(len(lines))
    text, space, checksum = lines[number].rpartition(b" ") if number else (lines[0], b"", b"")
    lines[number] = mutate_json_file(text, rng).replace(b"\n", b"") + space + checksum
    return b"\n".join(lines) + b"\n"


class Records(Merging):
    """`gradmerge.json` of a result that is there already."""

    name, share = "record", 2.0

    def make(self) -> None:
        write_models()
        gm.merge(recipe(), self.place.out, threads=1)
        self.whole = files_in(self.place.out.parent)
        self.record = next(path for path in self.whole if path.name == "gradmerge.json")

    def run(self, rng: random.Random | None) -> None:
        left = dict(self.whole)
        if rng is not None:
            left[self.record] = mutate_json_file(left[self.record], rng)
        self.place.prepare(left)
        if not gm.merge(recipe(), self.place.out, threads=1, resume=True).already_done:
            raise Broken("a folder that was there was written over")

    def check(self, outcome: str) -> None:
        if files_in(self.place.out.parent) != self.place.prepared:
            raise Broken("a folder that was there was changed")


class UnfinishedEstimate(Kind):
    """An estimate that was stopped: its saved sums or the mark beside them, changed before it is resumed."""

    name, share = "saved-sums", 0.6

    def make(self) -> None:
        from tests.tasks.making import labelled, tiny_bert_checkpoint, write_jsonl

        tiny_bert_checkpoint(Path("bert"), num_hidden_layers=1)
        write_jsonl(Path("data.jsonl"), labelled(6))
        stop = _Stop("estimating", 3)
        with contextlib.suppress(KeyboardInterrupt):
            self._measure(progress=stop, save_every=0.0)
        self.left = files_in(self.place.out.parent)
        self.place.clear_out()

    def _measure(self, **settings: Any) -> None:
        from .data import models_kept

        with models_kept():
            estimate_curvature("bert", "data.jsonl", out=self.place.out, batch_size=2, device="cpu", **settings)

    def run(self, rng: random.Random | None) -> None:
        left = dict(self.left)
        if rng is not None:
            name = rng.choice(list(left))
            changes = [mutate_file, mutate_metadata] if name.suffix == ".safetensors" else [mutate_json_file]
            left[name] = rng.choice(changes)(left[name], rng)
        self.place.prepare(left)
        self._measure(resume=True)

    def check(self, outcome: str) -> None:
        if outcome == "worked":
            if gm.Curvature.load(self.place.out).examples != 6:
                raise Broken("a sum over another number of examples than there are rows")
        elif self.place.out.exists():
            raise Broken("there is a result of a measurement that failed")


KINDS: list[type[Kind]] = [CurvatureFiles, Grams, Reports, TrainerCheckpoints, Unfinished, Records, UnfinishedEstimate]
