"""The data of the demonstration: no image is in two splits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gradmerge.demo import digits

from .making import tiny


def test_an_image_is_in_the_same_split_in_every_task(tmp_path: Path) -> None:
    found, labels = digits.load_digits()
    settings = tiny(3)
    digits.write_data(tmp_path, found, labels, settings)
    data = {path.stem: dict(np.load(path)) for path in tmp_path.iterdir()}
    number = {image.tobytes(): index for index, image in enumerate(found)}
    assert len(number) == len(found), "two images are the same, so that this test proves nothing"
    rows = {split: [number[image.tobytes()] for image in data["upright"][f"x_{split}"]] for split in ("train", "test")}
    for split, indices in rows.items():
        for name, change in digits.CHANGES.items():
            assert np.array_equal(data[name][f"x_{split}"], change(found[indices]))
            assert np.array_equal(data[name][f"y_{split}"], labels[indices])
    assert len({*rows["train"], *rows["test"]}) == settings.train + settings.test
    parts = {name: data[name]["x_train"] for name in data}
    assert np.array_equal(parts["all"], np.concatenate([parts[name] for name in digits.CHANGES]))
    assert np.array_equal(parts["rest"], np.concatenate([parts["upright"], parts["thick"], parts["blurred"]]))
