"""Images of every form become the same pixels, and hostile images are refused."""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import EpsImagePlugin, Image

from gradmerge.errors import InputError
from gradmerge.tasks import load_task
from tests.tasks.making import tiny_vit_checkpoint, write_jsonl


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("models")
    names = {"label2id": {"dog": 0, "bird": 1, "cat": 2}, "id2label": {0: "dog", 1: "bird", 2: "cat"}}
    return {
        "rgb": str(tiny_vit_checkpoint(place / "rgb")),
        "gray": str(tiny_vit_checkpoint(place / "gray", channels=1)),
        "named": str(tiny_vit_checkpoint(place / "named", **names)),
    }


PIXELS = np.random.default_rng(0).integers(0, 256, (5, 8, 8, 3)).astype(np.uint8)
LABELS = [0, 1, 2, 1, 0]


def pixels_of(model: str, source: Any, **options: Any) -> torch.Tensor:
    loaded = load_task(model, str(source), device="cpu", **options)
    return torch.cat([batch["pixel_values"] for batch in loaded.batches(2)])


def png(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "png")
    return buffer.getvalue()


def write_images(folder: Path, form: str) -> str:
    """Write the same images in one of several forms."""
    arrays = {
        "npz": PIXELS,
        "float npz": PIXELS.astype(np.float32) / 255,
        "channels first npz": PIXELS.transpose(0, 3, 1, 2),
    }
    if form in arrays:
        np.savez(folder / "a.npz", x=arrays[form], y=LABELS)
        return str(folder / "a.npz")
    images = [png(array) for array in PIXELS]
    if form == "paths":
        for number, image in enumerate(images):
            (folder / f"{number}.png").write_bytes(image)
        rows: Any = [{"image": f"{n}.png", "label": y} for n, y in enumerate(LABELS)]
        return str(write_jsonl(folder / "paths.jsonl", rows))
    rows = [
        {"image": image if form == "bytes" else {"bytes": image}, "label": y}
        for image, y in zip(images, LABELS, strict=True)
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    return str(folder / "a.parquet")


def processed(pixels: Any) -> torch.Tensor:
    """As the processor of the models scales and normalizes pixels, N × height × width × channels."""
    return (torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255 - 0.4) / 0.3


@pytest.mark.parametrize("form", ["npz", "float npz", "channels first npz", "bytes", "bytes of the Hub", "paths"])
def test_every_form_gives_the_same_pixels(models: dict[str, str], tmp_path: Path, form: str) -> None:
    source = write_images(tmp_path, form)
    assert torch.allclose(pixels_of(models["rgb"], source), processed(PIXELS), atol=1e-5)
    assert load_task(models["rgb"], source).notes == []


def test_folders_of_images_are_matched_with_the_classes_of_the_model(models: dict[str, str], tmp_path: Path) -> None:
    for number, name in enumerate(["cat", "dog"]):
        (tmp_path / "photos" / name).mkdir(parents=True)
        Image.fromarray(PIXELS[number]).save(tmp_path / "photos" / name / "one.png")
    source = str(tmp_path / "photos")
    assert load_task(models["named"], source).data.labels.tolist() == [2, 0]
    loaded = load_task(models["rgb"], source, dtype="bfloat16", device="cpu")
    assert loaded.data.labels.tolist() == [0, 1] and loaded.notes
    batch = next(loaded.batches(2))
    assert torch.allclose(batch["pixel_values"].float(), processed(PIXELS[:2]), atol=0.02)
    loaded.model(**batch)


def test_colors_and_gray_are_converted_to_the_channels_of_the_model(models: dict[str, str], tmp_path: Path) -> None:
    gray = np.stack([np.asarray(Image.fromarray(array).convert("L")) for array in PIXELS])[..., None]
    assert torch.allclose(pixels_of(models["gray"], write_images(tmp_path, "npz")), processed(gray), atol=1e-5)
    np.savez(tmp_path / "gray.npz", x=PIXELS[..., 0], y=LABELS)
    want = processed(PIXELS[..., :1].repeat(3, -1))
    assert torch.allclose(pixels_of(models["rgb"], tmp_path / "gray.npz"), want, atol=1e-5)


def test_a_model_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    model = tiny_vit_checkpoint(tmp_path / "model")
    (model / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="preprocessor_config"):
        load_task(model, write_images(tmp_path, "npz"))


def png_header(width: int, height: int) -> bytes:
    """A picture that claims a size, and has no pixels."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return start + struct.pack(">I", 1000) + b"IDAT"


HOSTILE_IMAGES = {
    "no image": b"no image",
    "a bomb": png_header(12_000, 12_000),
    "a picture cut short": png_header(6, 6),
    "a GIF of nothing": b"GIF89a" + bytes(7),
    "a TIFF that refers to itself": b"II*\0\x08\0\0\0\x01\0" + b"\xff" * 12 + b"\x08\0\0\0",
}


@pytest.mark.parametrize("case", HOSTILE_IMAGES)
def test_a_hostile_image_is_refused_by_row(models: dict[str, str], tmp_path: Path, case: str) -> None:
    (tmp_path / "x.png").write_bytes(HOSTILE_IMAGES[case])
    source = write_jsonl(tmp_path / "a.jsonl", [{"image": "x.png", "label": 0}])
    with pytest.raises(InputError, match="row 1"):
        pixels_of(models["rgb"], source)


def test_postscript_under_the_name_of_an_image_starts_no_program(
    models: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    buffer = io.BytesIO()
    Image.fromarray(PIXELS[0]).save(buffer, "eps")
    (tmp_path / "x.png").write_bytes(buffer.getvalue())
    with pytest.raises(InputError, match="row 1"):
        pixels_of(models["rgb"], write_jsonl(tmp_path / "a.jsonl", [{"image": "x.png", "label": 0}]))
    assert not (tmp_path / "started").exists()


def test_paths_of_other_things_are_not_opened(models: dict[str, str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    for path in ("pipe.png", "gone.png", "/dev/zero", ".", "~nobody-of-that-name/x.png", "a\0b", 5):
        with pytest.raises(InputError, match="row 1"):
            pixels_of(models["rgb"], write_jsonl(tmp_path / "a.jsonl", [{"image": path, "label": 0}]))


def test_lists_without_pixels_are_refused_by_row(models: dict[str, str], tmp_path: Path) -> None:
    for image in ([[300, 0]], [[-1, 0]], [["a"]], [[[0, 1], [2]]], [], [[2.5, 0]]):
        with pytest.raises(InputError, match="row 1"):
            pixels_of(models["rgb"], write_jsonl(tmp_path / "a.jsonl", [{"image": image, "label": 0}]))


def test_a_processor_of_huge_images_is_refused(tmp_path: Path) -> None:
    model = tiny_vit_checkpoint(tmp_path / "model")
    path = model / "preprocessor_config.json"
    settings = json.loads(path.read_text()) | {"size": {"height": 200_000, "width": 8}}
    path.write_text(json.dumps(settings))
    with pytest.raises(InputError):
        pixels_of(str(model), write_images(tmp_path, "npz"))
