"""Task `image`: rows with images as batches of pixels."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from ..curvature.losses import ExampleLoss, loss_of
from ..errors import InputError
from ..text import count
from .data.columns import Fields
from .data.labels import read_labels
from .data.read import Rows, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

#: The formats that Pillow may open. It would pass PostScript to another program, Ghostscript.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
#: An image of a few kB may unpack to any size.
MAX_PIXELS = 100_000_000


class ImageData:
    """Images, with labels if the fields name a column for them."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, processor: Any) -> None:
        self.rows, self.column, self.processor = rows, fields["image"][0], processor
        config: Any = model.config
        self.channels = int(getattr(config, "num_channels", 3))
        self.size = _image_size(config)
        self.dtype = next(model.parameters()).dtype
        self.labels = None
        if "label" in fields:
            self.labels = read_labels(rows, fields["label"][0], config)
            self.loss: ExampleLoss = loss_of(model, self.labels)
        if processor is None:
            if self.size is None:
                raise InputError(
                    f"{rows.label}: the model has no preprocessor_config.json, and its config no image_size, so the "
                    "size of its images is unknown. Copy preprocessor_config.json from the base model."
                )
            rows.notes.append(
                f"the model has no preprocessor_config.json: images are resized to {self.size[0]} × {self.size[1]} "
                "and scaled to [0, 1]"
            )

    def notes(self) -> list[str]:
        return self.rows.notes

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        inputs = {"pixel_values": self._pixels(indices).to(self.dtype)}
        return inputs if self.labels is None else inputs | {"labels": self.labels[list(indices)]}

    def _pixels(self, indices: Sequence[int]) -> Tensor:
        images = [self.image(index) for index in indices]
        if self.processor is None:
            assert self.size is not None
            return torch.stack([_scale(image, self.size) for image in images])
        try:
            pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
            if not isinstance(pixels, Tensor):
                raise TypeError(f"it gives {type(pixels).__name__} instead of a tensor")
        except MemoryError:
            raise
        except Exception as error:  # every processor has errors of its own
            raise self.rows.error(indices[0], f"the model's image processor fails on the image: {error}") from error
        return pixels

    def image(self, index: int) -> Image:
        """Open the image of a row, and convert it to the model's channels: gray for one, RGB for three."""
        value = self.rows.cell(index, self.column)
        try:
            image = _open_image(value, self.rows.folder)
            if self.channels in (1, 3):
                return image.convert("L" if self.channels == 1 else "RGB")
            if len(image.getbands()) != self.channels:
                raise InputError(f"an image of {image.mode}, but the model takes {self.channels} channels")
            return image
        except MemoryError:
            raise
        except Exception as error:  # every format of Pillow has errors of its own
            what = "" if isinstance(value, bytes | dict) else f"{shorten(value)}: "
            raise self.rows.error(index, f"{what}the image cannot be read: {error}") from error


def _image_size(config: Any) -> tuple[int, int] | None:
    """Return height and width of the model's input in pixels."""
    size = getattr(config, "image_size", None)
    sizes = tuple(size) if isinstance(size, list | tuple) else (size, size)
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        return None
    height, width = sizes
    if height * width > MAX_PIXELS:
        raise InputError(f"the model's image_size {shorten(size)} is above the limit of {count(MAX_PIXELS)} pixels")
    return height, width


def _open_image(value: Any, folder: Path) -> Image:
    """Open an image from a path, the bytes of a file, a Hub dataset's dictionary of either, or an array."""
    from PIL import Image

    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | str):
        file = io.BytesIO(value) if isinstance(value, bytes) else folder / Path(value).expanduser()
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise InputError("not a file")
        image = Image.open(file, formats=FORMATS)
        if image.width * image.height > MAX_PIXELS:  # from the header, before any pixel is unpacked
            raise InputError(f"{image.width} × {image.height} is above the limit of {count(MAX_PIXELS)} pixels")
        image.load()  # and close the file
        return image
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, np.ndarray | list):
        return Image.fromarray(_to_bytes(_channels_last(np.asarray(value))))
    raise InputError(f"{type(value).__name__} is not a path, the bytes of an image file or an array")


def _channels_last(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return height × width × channels."""
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim != 3:
        raise InputError(f"an array of shape {list(array.shape)} is not an image")
    channels_first = array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4)
    return array.transpose(1, 2, 0) if channels_first else array


def _to_bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return pixels from 0 to 255. Numbers in [0, 1] are scaled."""
    if array.dtype.kind in "fb":
        array = np.rint(array * 255.0)
    if array.dtype.kind not in "uif" or not (array.size and array.min() >= 0 and array.max() <= 255):
        raise InputError(f"pixels of an array ({array.dtype}) must be from 0 to 255, or from 0 to 1")
    array = np.ascontiguousarray(array.astype(np.uint8))
    return array[:, :, 0] if array.shape[-1] == 1 else array


def _scale(image: Image, size: tuple[int, int]) -> Tensor:
    """Resize an image, and scale its pixels to [0, 1]."""
    from PIL import Image

    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image, dtype=np.float32) / 255
    return torch.from_numpy(_channels_last(array).copy()).permute(2, 0, 1)
