"""Task `image`: rows with images as batches of pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from ..curvature.losses import ExampleLoss, loss_of
from ..errors import library_errors
from ..text import count
from .columns import Fields, read_labels
from .data import Rows

#: The formats that Pillow may open. It would pass PostScript to another program, Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
#: An image of a few kB may unpack to any size.
MAX_PIXELS = 100_000_000


class ImageData:
    """Images, with labels if the fields name a column for them."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, processor: Any) -> None:
        self.rows, self.column, self.processor = rows, fields["image"][0], processor
        config: Any = model.config
        self.mode = "L" if getattr(config, "num_channels", 3) == 1 else "RGB"
        self.dtype = next(model.parameters()).dtype
        self.labels = None
        if "label" in fields:
            self.labels = read_labels(rows, fields["label"][0], config)
            self.loss: ExampleLoss = loss_of(model, self.labels)

    def notes(self) -> list[str]:
        return self.rows.notes

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """Return rows as arguments of the model."""
        images = [self.image(index) for index in indices]
        with library_errors(f"{self.rows.name(indices[0])}: the model's image processor fails on the image"):
            pixels = self.processor(images=images, return_tensors="pt")["pixel_values"].to(self.dtype)
        inputs = {"pixel_values": pixels}
        return inputs if self.labels is None else inputs | {"labels": self.labels[list(indices)]}

    def image(self, index: int) -> Image.Image:
        """Open the image of a row, and convert it to the model's channels: gray for one, RGB for three."""
        value = self.rows.cell(index, self.column)
        path = f" {value}" if isinstance(value, str) else ""
        with library_errors(f"{self.rows.name(index)}: the image{path} cannot be read"):
            return _open_image(value, self.rows.folder).convert(self.mode)


def _open_image(value: Any, folder: Path) -> Image.Image:
    """Open an image from a path, the bytes of a file, a Hub dataset's dictionary of either, or an array."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | str):
        file = io.BytesIO(value) if isinstance(value, bytes) else folder / Path(value).expanduser()
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise ValueError("not a file")
        image = Image.open(file, formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:  # from the header, before any pixel is unpacked
            raise ValueError(f"{image.width} × {image.height} is above the limit of {count(MAX_PIXELS)} pixels")
        image.load()  # and close the file
        return image
    if isinstance(value, np.ndarray | list):
        return Image.fromarray(_pixels(np.asarray(value)))
    raise ValueError(f"{type(value).__name__} is not a path, the bytes of an image file or an array")


def _pixels(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return pixels from 0 to 255, height × width (× channels). Numbers in [0, 1] are scaled."""
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        array = array.transpose(1, 2, 0)  # channels first
    if array.dtype.kind in "fb":
        array = np.rint(array * 255.0)
    if array.dtype.kind not in "uif" or not (array.size and array.min() >= 0 and array.max() <= 255):
        raise ValueError(f"pixels of an array ({array.dtype}) must be from 0 to 255, or from 0 to 1")
    array = np.ascontiguousarray(array.astype(np.uint8))
    return array[:, :, 0] if array.ndim == 3 and array.shape[-1] == 1 else array
