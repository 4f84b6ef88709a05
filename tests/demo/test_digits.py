"""The data of the demonstration: changes pixel by pixel, and a split that no image crosses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gradmerge.demo import digits

from .making import tiny


@pytest.fixture(scope="module")
def images() -> digits.Array:
    return digits.load_digits()[0][:20]


def at(image: digits.Array, y: int, x: int) -> int:
    """A pixel, 0 beyond the edge."""
    return int(image[y, x]) if 0 <= y < 8 and 0 <= x < 8 else 0


def test_images_are_bytes_from_0_to_255_with_ten_classes() -> None:
    found, labels = digits.load_digits()
    assert found.shape == (1797, 8, 8) and found.dtype == np.uint8
    assert (found.min(), found.max()) == (0, 255)
    assert sorted(set(labels.tolist())) == list(range(10))


def test_thick_takes_the_largest_of_a_pixel_and_those_above_and_left_of_it(images: digits.Array) -> None:
    for before, after in zip(images, digits.thick(images), strict=True):
        for y in range(8):
            for x in range(8):
                assert after[y, x] == max(at(before, y - j, x - i) for j in (0, 1) for i in (0, 1))


def test_blurred_takes_the_mean_of_nine_pixels_with_the_edge_repeated(images: digits.Array) -> None:
    for before, after in zip(images, digits.blurred(images), strict=True):
        for y in range(8):
            for x in range(8):
                around = [
                    float(before[min(7, max(0, y + j)), min(7, max(0, x + i))]) for j in (-1, 0, 1) for i in (-1, 0, 1)
                ]
                assert abs(after[y, x] - sum(around) / 9) <= 0.5 + 1e-9


def test_tilted_turns_clockwise() -> None:
    line = np.zeros((1, 8, 8), np.uint8)
    line[0, :, 3:5] = 255
    turned = digits.tilted(line)[0]
    columns = np.arange(8)
    top, bottom = (float((turned[row] * columns).sum() / turned[row].sum()) for row in (1, 6))
    want = 5 * np.tan(np.radians(20))
    assert top - bottom == pytest.approx(want, abs=0.5)


def test_an_image_is_in_one_split_only_whatever_its_form(tmp_path: Path) -> None:
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


def test_what_stays_lacks_the_removed_task_and_all_has_everything(tmp_path: Path) -> None:
    found, labels = digits.load_digits()
    digits.write_data(tmp_path, found, labels, tiny())
    parts = {name: digits.read_array(tmp_path / f"{name}.npz", "x_train") for name in (*digits.CHANGES, "rest", "all")}
    assert np.array_equal(parts["all"], np.concatenate([parts[name] for name in digits.CHANGES]))
    assert np.array_equal(parts["rest"], np.concatenate([parts["upright"], parts["thick"], parts["blurred"]]))
