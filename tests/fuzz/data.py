"""Kinds of input that a model is run on or made of: data sources, and folders that transformers opens."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

import gradmerge as gm
from gradmerge.tasks import loading

from .mutate import mutate_bytes, mutate_file, mutate_json, mutate_json_file, mutate_text, mutate_zip, packed
from .trial import Kind

_kept: dict[tuple[str, str], Any] = {}


@contextlib.contextmanager
def models_kept() -> Iterator[None]:
    """Models, tokenizers and image processors are loaded once, as only the data change."""

    def kept(name: str) -> Any:
        original = getattr(loading, name)

        def load(reference: str, *arguments: Any, **settings: Any) -> Any:
            key = (name, str(Path(reference).absolute()))
            if key not in _kept:
                _kept[key] = original(reference, *arguments, **settings)
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

    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        return mutate_text(raw, rng)

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            raw = self.mutated(self.content(), rng)
            self.place.put(self.source, raw)
        limit = rng.choice([None, None, 1, 3]) if rng else None
        with models_kept():
            gm.evaluate(self.model, self.read(rng), limit=limit, batch_size=2, device="cpu")

    def read(self, rng: random.Random | None) -> str:
        return self.source

    def check(self, outcome: str) -> None:
        pass


class Jsonl(Data):
    name, source, share = "data-jsonl", "data.jsonl", 5.0

    def content(self) -> bytes:
        return b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)

    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.5:
            return mutate_text(raw, rng)
        number = rng.randrange(len(ROWS))
        lines = raw.splitlines(keepends=True)
        lines[number] = mutate_json(ROWS[number], rng) + b"\n"
        return b"".join(lines)


class Messages(Jsonl):
    """Chats, and prompts with answers, for a language model."""

    name, model, share = "data-messages", "gpt2", 2.0
    rows: list[dict[str, Any]] = [  # noqa: RUF012
        {"text": "a good film"},
        {"text": "paris is blue", "prompt": "what is paris ?", "completion": "blue"},
    ]

    def content(self) -> bytes:
        return b"".join(json.dumps(row).encode() + b"\n" for row in self.rows)

    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        row = rng.choice(self.rows)
        return mutate_text(raw, rng) if rng.random() < 0.5 else mutate_json(row, rng) + b"\n" + raw


class Csv(Data):
    name, source = "data-csv", "data.csv"

    def content(self) -> bytes:
        return b"text,label\n" + b"".join(f'"{row["text"]}",{row["label"]}\n'.encode() for row in ROWS)


class Txt(Data):
    name, source, model = "data-txt", "data.txt", "gpt2"

    def content(self) -> bytes:
        return b"".join(f"{row['text']}\n".encode() for row in ROWS)


class Parquet(Data):
    name, source = "data-parquet", "data.parquet"

    def content(self) -> bytes:
        import pyarrow
        import pyarrow.parquet

        file = io.BytesIO()
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
        return file.getvalue()

    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.8:
            return mutate_bytes(raw, rng)
        import pyarrow
        import pyarrow.parquet

        columns: Any = rng.choice(
            [{"text": [None, "a"]}, {"text": [b"\xff", b"a"]}, {"text": [[1], [2]]}, {"text": [{"a": 1}, None]}, {}]
        )
        file = io.BytesIO()
        pyarrow.parquet.write_table(
            pyarrow.table(columns | {"label": rng.choice([[0, 1], [1.5, None], ["x", "y"]])}), file
        )
        return file.getvalue()


class Gz(Jsonl):
    name, source, share = "data-gz", "data.jsonl.gz", 2.0

    def content(self) -> bytes:
        return packed(super().content())

    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        import gzip

        return mutate_bytes(raw, rng) if rng.random() < 0.6 else packed(super().mutated(gzip.decompress(raw), rng))


class Npz(Data):
    name, source, model = "data-npz", "data.npz", "vit"

    def content(self) -> bytes:
        return _npz({"x": np.arange(4 * 8 * 8 * 3, dtype=np.uint8).reshape(4, 8, 8, 3), "y": np.array([0, 1, 2, 0])})

    def mutated(self, raw: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.7:
            return mutate_zip(raw, rng)
        x = rng.choice(
            [
                *[np.zeros((4, 8, 8)), np.full((4, 8, 8, 3), np.nan), np.zeros((0, 8, 8, 3)), np.zeros((4, 0, 0, 3))],
                *[np.array(3), np.full((4, 8, 8, 2), 300), np.zeros((4, 8, 8, 3), np.complex64), np.array(["a"] * 4)],
                np.zeros((4, 1, 1, 4), bool),
            ]
        )
        y = rng.choice(
            [
                *[np.array([0, 1, 2, 9]), np.array([-1, 0, 0, 0]), np.array([0.5] * 4), np.array(["a"] * 4)],
                *[np.array([[0]] * 4), np.array(2), np.array([np.nan] * 4), np.array([2**62] * 4), np.zeros((4, 3))],
                np.array([0, 1, 2, 0], np.uint64),
            ]
        )
        return _npz({rng.choice(["x", "X", "x_test", "z"]): x, rng.choice(["y", "Y", "y_test"]): y})

    def read(self, rng: random.Random | None) -> str:
        return rng.choice([self.source] * 5 + [f"{self.source}:test", f"{self.source}:"]) if rng else self.source


def _npz(arrays: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


class Images(Data):
    """A folder of images by class."""

    name, source, model = "data-images", "images", "vit"
    formats = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM")

    def make(self) -> None:
        from PIL import Image

        from tests.tasks.making import tiny_vit_checkpoint

        tiny_vit_checkpoint(Path("vit"))
        pixels = np.arange(8 * 8 * 3, dtype=np.uint8).reshape(8, 8, 3)
        self.images: dict[str, bytes] = {}
        for kind in self.formats:
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, kind)
            self.images[kind] = file.getvalue()
        for number in range(3):
            Path(f"images/{number}").mkdir(parents=True)
            Path(f"images/{number}/one.png").write_bytes(self.images["PNG"])

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            raw = self.images[rng.choice(self.formats)]
            name = rng.choice(
                ["one.png", "one.png", "two.jpg", "x.gif", "\udcff.png", "y.tif", ".hidden.png", "z.webp"]
            )
            self.place.put(f"images/{rng.randrange(3)}/{name}", mutate_bytes(raw, rng) if rng.random() < 0.9 else b"")
        with models_kept():
            gm.evaluate("vit", "images", batch_size=2, device="cpu")


def mutate_config(raw: bytes, rng: random.Random) -> bytes:
    """A config that transformers builds a model from: often with one size that is another."""
    value = json.loads(raw)
    sizes = [key for key, number in value.items() if isinstance(number, int)]
    if rng.random() < 0.6 or not sizes:
        return mutate_json_file(raw, rng)
    value[rng.choice(sizes)] = rng.choice([0, -1, 3, 100, 10**4, 10**6, 2**31, 10**30, 0.5, "3", None, [3]])
    return json.dumps(value).encode()


class Loaded(Kind):
    """What transformers reads of a model's folder before it runs: config, weights, tokenizer, image processor."""

    name, share = "transformers-folder", 1.0

    def make(self) -> None:
        from tests.tasks.making import tiny_bert_checkpoint, tiny_vit_checkpoint

        tiny_bert_checkpoint(Path("bert"), num_hidden_layers=1)
        tiny_vit_checkpoint(Path("vit"), num_hidden_layers=1)
        Path("data.jsonl").write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in ROWS[:2]))
        Path("data.npz").write_bytes(_npz({"x": np.zeros((2, 8, 8, 3), np.uint8), "y": np.array([0, 1])}))

    def run(self, rng: random.Random | None) -> None:
        model = rng.choice(["bert", "vit"]) if rng else "bert"
        if rng is not None:
            found = sorted(p for p in Path(model).iterdir() if p.suffix in (".json", ".safetensors", ".txt"))
            path = rng.choice(found)
            raw = self.place.original(str(path))
            change: Any = {".json": mutate_config, ".safetensors": mutate_file, ".txt": mutate_text}[path.suffix]
            self.place.put(str(path), change(raw, rng))
        gm.evaluate(model, "data.jsonl" if model == "bert" else "data.npz", device="cpu")

    def check(self, outcome: str) -> None:
        pass


class ImportConfig(Kind):
    """`config.json` beside an optimizer's state, which names the model."""

    name, share = "trainer-config", 0.8

    def make(self) -> None:
        import torch
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {
            "vocab_size": 8,
            "hidden_size": 4,
            "num_hidden_layers": 1,
            "num_attention_heads": 1,
            "intermediate_size": 4,
        }
        model = BertForSequenceClassification(BertConfig(**sizes, max_position_embeddings=8))
        model.save_pretrained(".")
        parameters = list(model.named_parameters())
        optimizer = torch.optim.AdamW(parameters)
        for _, parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        torch.save(optimizer.state_dict(), "optimizer.pt")

    def run(self, rng: random.Random | None) -> None:
        if rng is not None:
            self.place.put("config.json", mutate_config(self.place.original("config.json"), rng))
        gm.import_curvature(".", dataset_size=10, batch_size=2)

    def check(self, outcome: str) -> None:
        pass


KINDS: list[type[Kind]] = [Jsonl, Messages, Csv, Txt, Parquet, Gz, Npz, Images, Loaded, ImportConfig]
