"""Kinds of input with curvature in them: its files, what a Trainer leaves, and unfinished work that is gone on with."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import gradmerge as gm
from gradmerge.curvature.curvature import pieces, summarize
from gradmerge.curvature.format import open_curvature
from gradmerge.engine.output import JOURNAL
from tests.making import random_curvature, random_state, weight_bytes

from .models import SHAPES, Merging, recipe, write_models
from .mutate import Draw, edited, json_file, metadata, tensor_file, tensor_values, torch_file
from .trial import Broken, Case, Kind, command, files_in

CURVATURE = [tensor_file, tensor_file, metadata, tensor_values]


class CurvatureFiles(Merging):
    """A curvature file of any precision: its bytes, its header, its metadata, its numbers."""

    name, share = "curvature", 10.0
    precisions = ("float32", "bfloat16", "log8")

    def make(self) -> None:
        write_models(curvature=True)
        for precision in self.precisions:
            random_curvature(0, random_state(0, SHAPES)).save(Path(precision), precision=precision)

    def case(self, draw: Draw) -> Case:
        precision = draw(st.sampled_from(self.precisions))
        name = f"{precision}/curvature.safetensors"
        how = {
            "precision": precision,
            "way": draw(st.sampled_from(["sums"] * 18 + ["load", "show"])),
            "method": draw(st.sampled_from(["gradient-matching", "fisher-averaging"])),
        }
        return Case({name: draw(draw(st.sampled_from(CURVATURE))(self.place.original(name)))}, how=how)

    def read(self, precision: str = "log8", way: str = "sums", method: str = "gradient-matching") -> None:
        if way == "show":
            command("curvature", "show", precision, "--json")
        elif way == "load":
            gm.Curvature.load(precision)
        else:
            with open_curvature(precision) as file:
                for group in summarize(pieces(file)):
                    if not group.total >= 0:
                        raise Broken(f"a sum of {group.total}")
        models: list[Any] = [{"model": "a", "curvature": precision}, "b"]
        self.merge(recipe(method=method, models=models, missing="zero"))


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

    def case(self, draw: Draw) -> Case:
        files = {"optimizer.pt": draw(torch_file(draw(st.sampled_from(list(self.states.values())))))}
        if draw(st.integers(0, 9)) == 0:
            files = {draw(st.sampled_from(["adapter_config.json", "optimizer.bin"])): b"x"}
        return Case(files, how={"precision": draw(st.sampled_from(["float32", "log8", "bfloat16"]))})

    def read(self, precision: str = "float32") -> None:
        gm.import_curvature(".", 24, 8, model=self.model).save(self.place.out, precision=precision)

    def check(self, outcome: str) -> None:
        left = [path.name for path in self.place.out.parent.iterdir()]
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
        with contextlib.suppress(KeyboardInterrupt):
            gm.merge(self.given, self.place.out, threads=1, block=8, progress=_Stop(400))
        self.left = files_in(self.place.out.parent)
        self.journal = next(path for path in self.left if path.name == JOURNAL)

    def valid(self) -> Case:
        return Case(left=self.left)

    def case(self, draw: Draw) -> Case:
        journal = self.left[self.journal]
        left = self.left | {self.journal: draw(draw(st.sampled_from([edited, journal_lines]))(journal))}
        if draw(st.integers(0, 19)) == 0:
            name = draw(st.sampled_from([path for path in left if path.suffix == ".safetensors"]))
            left[name] = left[name][: draw(st.integers(0, len(left[name]) - 1))]
        return Case(left=left)

    def read(self) -> None:
        gm.merge(self.given, self.place.out, threads=1, block=8, resume=True)

    def check(self, outcome: str) -> None:
        if outcome == "worked" and weight_bytes(self.place.out) != self.whole:
            raise Broken("another result than that of an undisturbed merge")
        if outcome != "worked" and self.place.out.exists():
            raise Broken("there is a result of a merge that failed")


class _Stop:
    """A progress that ends a merge after so many bytes, but not while thresholds are measured."""

    def __init__(self, most: int) -> None:
        self.left = most

    def begin(self, what: str, total: int, done: int = 0) -> None:
        self.counts = what == "merging"

    def advance(self, amount: int) -> None:
        self.left -= amount if self.counts else 0
        if self.left < 0:
            raise KeyboardInterrupt


@st.composite
def journal_lines(draw: Draw, raw: bytes) -> bytes:
    """Lines of JSON, all but the first with a checksum, of which one is changed."""
    lines = raw.splitlines()
    number = draw(st.integers(0, len(lines) - 1))
    text, space, checksum = lines[number].rpartition(b" ") if number else (lines[0], b"", b"")
    lines[number] = draw(json_file(text)).replace(b"\n", b"") + space + checksum
    return b"\n".join(lines) + b"\n"


KINDS: list[type[Kind]] = [CurvatureFiles, TrainerCheckpoints, Unfinished]
