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
    number = {image.tobytes(): index for index, image in enumerate(found)}
    assert len(number) == len(found), "two images are the same, so that this test proves nothing"
    rows = {}
    for split in digits.SPLITS:
        plain = digits.read_array(tmp_path / "upright.npz", f"x_{split}")
        rows[split] = [number[image.tobytes()] for image in plain]
        for name, change in digits.CHANGES.items():
            want = change(found[rows[split]])
            assert np.array_equal(digits.read_array(tmp_path / f"{name}.npz", f"x_{split}"), want)
            assert np.array_equal(digits.read_array(tmp_path / f"{name}.npz", f"y_{split}"), labels[rows[split]])
    every = [index for split in digits.SPLITS for index in rows[split]]
    assert len(every) == len(set(every)) == settings.train + settings.valid + settings.test


def test_rest_lacks_the_removed_task(tmp_path: Path) -> None:
    found, labels = digits.load_digits()
    digits.write_data(tmp_path, found, labels, tiny())
    parts = {name: digits.read_array(tmp_path / f"{name}.npz", "x_train") for name in (*digits.CHANGES, "rest", "all")}
    assert np.array_equal(parts["all"], np.concatenate([parts[name] for name in digits.CHANGES]))
    assert np.array_equal(parts["rest"], np.concatenate([parts["upright"], parts["thick"], parts["blurred"]]))
