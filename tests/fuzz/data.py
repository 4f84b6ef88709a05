"""Kinds of input that a model is run on or made of: data sources, and folders that transformers opens."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import gradmerge as gm
from gradmerge.tasks import loading

from .mutate import Draw, archive, edited, json_file, json_of, tensor_file
from .trial import Case, Kind

_kept: dict[tuple[str, str], Any] = {}


@contextlib.contextmanager
def models_kept() -> Iterator[None]:
    """Models, tokenizers and image processors are loaded once, as only the data change."""

    def kept(name: str) -> Any:
        original = getattr(loading, name)

        def load(model: Any, *arguments: Any, **settings: Any) -> Any:
            key = (name, str(Path(getattr(model, "reference", model)).absolute()))
            if key not in _kept:
                _kept[key] = original(model, *arguments, **settings)
            return _kept[key]

        return patch.object(loading, name, load)

    with kept("load_model"), kept("load_tokenizer"), kept("load_image_processor"):
        yield


ROWS = [
    {"text": "a good film", "label": 1},
    {"text": "a bad plot , very dull", "label": 0},
    {"text": "the ending was awful", "label": 0},
    {"text": "great music", "label": 1},
    {"text": "i loved it", "label": 1},
]


class Data(Kind):
    """A data source, read and evaluated on."""

    model = "bert"
    source: str
    share = 2.5

    def make(self) -> None:
        from tests.tasks import making

        make: Any = getattr(making, f"tiny_{self.model}_checkpoint")
        make(Path(self.model))
        Path(self.source).write_bytes(self.content())

    def content(self) -> bytes:
        raise NotImplementedError

    def mutated(self, raw: bytes) -> SearchStrategy[bytes]:
        return edited(raw)

    def case(self, draw: Draw) -> Case:
        return Case(
            {self.source: draw(self.mutated(self.content()))},
            how={"limit": draw(st.sampled_from([None, None, 1, 3]))},
        )

    def read(self, limit: int | None = None) -> None:
        with models_kept():
            gm.evaluate(self.model, self.source, limit=limit, batch_size=2, device="cpu")

    def check(self, outcome: str) -> None:
        pass


class Jsonl(Data):
    name, source, share = "data-jsonl", "data.jsonl", 5.0
    rows: list[dict[str, Any]] = ROWS

    def content(self) -> bytes:
        return b"".join(json.dumps(row).encode() + b"\n" for row in self.rows)

    def mutated(self, raw: bytes) -> SearchStrategy[bytes]:
        one_row = st.sampled_from(self.rows).flatmap(json_of)
        return edited(raw) | one_row.map(lambda row: row + b"\n" + raw)


class Npz(Data):
    name, source, model = "data-npz", "data.npz", "vit"

    def content(self) -> bytes:
        return npz({"x": np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3), "y": np.array([0, 1, 2, 0])})

    def mutated(self, raw: bytes) -> SearchStrategy[bytes]:
        arrays = [np.zeros((4, 8, 8)), np.full((4, 8, 8, 3), np.nan), np.zeros((0, 8, 8, 3)), np.array(["a"] * 4)]
        arrays += [np.array(3), np.zeros((4, 8, 8, 3), np.complex64), np.array([0, 1, 2, 9]), np.array([np.nan] * 4)]
        other = st.builds(lambda x, y: npz({"x": x, "y": y}), st.sampled_from(arrays), st.sampled_from(arrays))
        return archive(raw) | other


def npz(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@st.composite
def config_file(draw: Draw, raw: bytes) -> bytes:
    """A config that transformers builds a model from: often with one size that is another."""
    value = json.loads(raw)
    sizes = [key for key, number in value.items() if isinstance(number, int)]
    if not sizes or draw(st.booleans()):
        return bytes(draw(json_file(raw)))
    odd = [0, -1, 3, 100, 10**4, 10**6, 2**31, 10**30, 0.5, "3", None, [3]]
    return json.dumps(value | {draw(st.sampled_from(sizes)): draw(st.sampled_from(odd))}).encode()


class Loaded(Kind):
    """What transformers reads of a model's folder before it runs: config, weights, tokenizer, image processor."""

    name, share = "transformers-folder", 1.0

    def make(self) -> None:
        from tests.tasks.making import tiny_bert_checkpoint, tiny_vit_checkpoint

        tiny_bert_checkpoint(Path("bert"), num_hidden_layers=1)
        tiny_vit_checkpoint(Path("vit"), num_hidden_layers=1)
        Path("data.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:2]))
        Path("data.npz").write_bytes(npz({"x": np.zeros((2, 8, 8, 3), np.uint8), "y": np.array([0, 1])}))

    def case(self, draw: Draw) -> Case:
        model = draw(st.sampled_from(["bert", "vit"]))
        found = sorted(p for p in Path(model).iterdir() if p.suffix in (".json", ".safetensors", ".txt"))
        path = draw(st.sampled_from(found))
        change: Any = {".json": config_file, ".safetensors": tensor_file, ".txt": edited}[path.suffix]
        return Case({str(path): draw(change(self.place.original(str(path))))}, how={"model": model})

    def read(self, model: str = "bert") -> None:
        gm.evaluate(model, "data.jsonl" if model == "bert" else "data.npz", device="cpu")

    def check(self, outcome: str) -> None:
        pass


class ImportConfig(Kind):
    """`config.json` beside an optimizer's state, which names the model."""

    name, share = "trainer-config", 0.8

    def make(self) -> None:
        from transformers import BertForSequenceClassification

        from tests.tasks.making import tiny_bert_checkpoint, write_adam_state

        tiny_bert_checkpoint(Path(), num_hidden_layers=1)
        write_adam_state(BertForSequenceClassification.from_pretrained("."), Path())

    def case(self, draw: Draw) -> Case:
        return Case({"config.json": draw(config_file(self.place.original("config.json")))})

    def read(self) -> None:
        gm.import_curvature(".", dataset_size=10, batch_size=2)

    def check(self, outcome: str) -> None:
        pass


KINDS: list[type[Kind]] = [Jsonl, Npz, Loaded, ImportConfig]
