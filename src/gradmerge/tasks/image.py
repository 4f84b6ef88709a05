"""Classification of images."""

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

#: What Pillow may take a file for, whatever its name: PostScript it would hand to Ghostscript, a program.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
#: A picture of a few kB may unfold to any size.
MOST_PIXELS = 100_000_000


class ImageExamples:
    """Images, with labels if the fields name a column for them."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, processor: Any) -> None:
        self.rows, self.column = rows, fields["image"][0]
        self.processor = processor
        config: Any = model.config
        self.channels = int(getattr(config, "num_channels", 3))
        self.size = _size_of(config)
        self.dtype = next(model.parameters()).dtype
        self.labels = None
        if {"label", "labels"} & fields.keys():
            self.labels = read_labels(rows, fields, config)
            self.output: ExampleLoss = loss_of(model, self.labels)
        self.prepared = self._prepared()
        """The data is the model's input already: floating-point numbers beyond [0, 1]."""
        if self.prepared:
            beyond = "the images are floating-point numbers beyond [0, 1]"
            rows.notes.append(f"{beyond}: taken as normalised, and not changed")
        elif processor is None:
            if self.size is None:
                nothing = "the model has no preprocessor_config.json, and its config no image_size"
                raise InputError(f"{rows.label}: {nothing}, so how its images are made is not known")
            made = f"images are resized to {self.size[0]} × {self.size[1]} and scaled to [0, 1]"
            rows.notes.append(f"the model has no preprocessor_config.json: {made}")

    def _prepared(self) -> bool:
        first = self.rows.cell(0, self.column)
        if not isinstance(first, np.ndarray) or first.dtype.kind != "f":
            return False
        return any(float(image.min()) < 0 or float(image.max()) > 1 for image in self.rows.column(self.column))

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        inputs = {"pixel_values": self._pixels(indices).to(self.dtype)}
        return inputs if self.labels is None else inputs | {"labels": self.labels[list(indices)]}

    def _pixels(self, indices: Sequence[int]) -> Tensor:
        if self.prepared:
            return torch.stack([self._as_stored(index) for index in indices])
        images = [self._picture(index) for index in indices]
        if self.processor is None:
            assert self.size is not None
            return torch.stack([_scaled(image, self.size) for image in images])
        try:
            pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
            if not isinstance(pixels, Tensor):
                raise TypeError(f"it gives {type(pixels).__name__} and no tensor")
        except MemoryError:
            raise
        except Exception as error:  # as many kinds as there are processors
            raise self.rows.error(indices[0], f"the model's image processor refuses the image: {error}") from error
        return pixels

    def _as_stored(self, index: int) -> Tensor:
        array = _channels_last(self.rows.cell(index, self.column))
        if array.shape[-1] == 1:
            array = np.repeat(array, self.channels, axis=-1)
        wanted = (*(self.size or array.shape[:2]), self.channels)
        if array.shape != wanted:
            takes = f"the model takes {list(wanted)} (height, width, channels)"
            raise self.rows.error(index, f"a normalised image of shape {list(array.shape)}, but {takes}")
        return torch.from_numpy(array.astype(np.float32)).permute(2, 0, 1)

    def _picture(self, index: int) -> Image:
        """An image with the model's channels: grey repeated for three, colours turned into grey for one."""
        value = self.rows.cell(index, self.column)
        try:
            picture = _opened(value, self.rows.folder)
            if self.channels not in (1, 3):
                if len(picture.getbands()) != self.channels:
                    raise InputError(f"an image of {picture.mode}, but the model takes {self.channels} channels")
                return picture
            return picture.convert("L" if self.channels == 1 else "RGB")
        except FileNotFoundError as error:
            reason = f"there is no file {error.filename}"
        except InputError as error:
            reason = str(error)
        except MemoryError:
            raise
        except Exception as error:  # every format of Pillow has errors of its own
            reason = f"the image cannot be read: {error}"
        what = value if isinstance(value, str) else shorten(value) if not isinstance(value, bytes | dict) else ""
        raise self.rows.error(index, f"{what + ': ' if what else ''}{reason}")

    def seen(self, index: int) -> Image:
        """A row as people see it; normalised numbers from black, the smallest, to white."""
        if not self.prepared:
            return self._picture(index)
        from PIL import Image

        array = _channels_last(self.rows.cell(index, self.column)).astype(np.float64)
        low, high = array.min(), array.max()
        return Image.fromarray(_bytes_of((array - low) / max(high - low, 1e-12)))

    def notes(self) -> list[str]:
        return self.rows.notes


def _size_of(config: Any) -> tuple[int, int] | None:
    """Height and width of the model's input in pixels."""
    stated = getattr(config, "image_size", None)
    sizes = tuple(stated) if isinstance(stated, list | tuple) else (stated, stated)
    if len(sizes) != 2 or not all(isinstance(n, int) and n > 0 for n in sizes):
        return None
    height, width = sizes
    if height * width > MOST_PIXELS:
        raise InputError(f"the model's image_size {shorten(stated)} is above the limit of {count(MOST_PIXELS)} pixels")
    return height, width


def _opened(value: Any, folder: Path) -> Image:
    """A picture from a path, from the bytes of a file, from how the Hub stores either, or from an array."""
    from PIL import Image

    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, bytes | str):
        file = io.BytesIO(value) if isinstance(value, bytes) else folder / Path(value).expanduser()
        if isinstance(file, Path) and file.exists() and not file.is_file():
            raise InputError("is no file")
        picture = Image.open(file, formats=FORMATS)
        # Refused by its header, before any of its pixels is unpacked.
        if picture.width * picture.height > MOST_PIXELS:
            size = f"{picture.width} × {picture.height}"
            raise InputError(f"an image of {size}, beyond the limit of {count(MOST_PIXELS)} pixels")
        picture.load()  # and close the file
        return picture
    if isinstance(value, Image.Image):
        return value
    if isinstance(value, np.ndarray | list):
        return Image.fromarray(_bytes_of(_channels_last(np.asarray(value))))
    raise InputError(f"no image but {type(value).__name__}; a path, the bytes of an image file or an array is needed")


def _channels_last(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Height × width × channels."""
    if array.ndim == 2:
        return array[:, :, None]
    if array.ndim == 3 and array.shape[-1] not in (1, 3, 4) and array.shape[0] in (1, 3, 4):
        return array.transpose(1, 2, 0)
    if array.ndim != 3:
        raise InputError(f"an array of shape {list(array.shape)} is no image")
    return array


def _bytes_of(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Pixels from 0 to 255; numbers in [0, 1] are scaled."""
    if array.dtype.kind in "fb":
        array = np.rint(array * 255.0)
    if array.dtype.kind not in "uif" or not (array.size and array.min() >= 0 and array.max() <= 255):
        raise InputError(f"an array of {array.dtype} that holds no pixels from 0 to 255, nor numbers from 0 to 1")
    array = np.ascontiguousarray(array.astype(np.uint8))
    return array[:, :, 0] if array.shape[-1] == 1 else array


def _scaled(image: Image, size: tuple[int, int]) -> Tensor:
    from PIL import Image

    height, width = size
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image, dtype=np.float32) / 255
    return torch.from_numpy(_channels_last(array).copy()).permute(2, 0, 1)
