"""Links are followed inside a model's folder and into its Hub cache's blobs, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.io.small_files import lies_within


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").touch()
    for outside in (tmp_path / "secret", tmp_path / "blobs" / "beef", tmp_path / "elsewhere" / "file"):
        outside.parent.mkdir(exist_ok=True)
        outside.touch()
    (tmp_path / "alias").symlink_to("model")
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    for name in ("models--org--name", "models--org--other"):
        (tmp_path / name / "snapshots" / "0123abc" / "inner").mkdir(parents=True)
        (tmp_path / name / "blobs").mkdir()
        (tmp_path / name / "blobs" / "beef").touch()
    (tmp_path / "secret").touch()
    return tmp_path / "models--org--name" / "snapshots" / "0123abc"


@pytest.mark.parametrize("folder", ["model", "alias"])
@pytest.mark.parametrize("name", ["file", "inner/file", "nothing/here"])
def test_files_in_the_folder_are_inside(model: Path, folder: str, name: str) -> None:
    assert lies_within(model.parent / folder / name, model)
    assert lies_within(model / name, model.parent / folder)


@pytest.mark.parametrize(
    ("target", "inside"),
    [
        *[("file", True), ("../model/file", True), ("link", False), ("second", False), ("../blobs/beef", False)],
        *[(target, False) for target in ("../secret", "/dev/zero", "..", "inner/../../secret", "../model-2/file")],
    ],
)
def test_a_link_is_followed_to_its_end(model: Path, target: str, inside: bool) -> None:
    (model / "second").symlink_to("../secret")
    (model / "link").symlink_to(target)
    assert lies_within(model / "link", model) is inside


def test_a_file_in_a_linked_subfolder_is_where_that_folder_is(model: Path) -> None:
    (model / "linked").symlink_to("../elsewhere")
    assert not lies_within(model / "linked" / "file", model)


@pytest.mark.parametrize("name", ["file", "inner/file"])
def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs(snapshot: Path, name: str) -> None:
    link = snapshot / name
    link.symlink_to("../" * (name.count("/") + 2) + "blobs/beef")
    assert link.exists()
    assert lies_within(link, snapshot)
    assert lies_within(link, link.parent)


@pytest.mark.parametrize("target", ["models--org--other/blobs/beef", "secret"])
def test_a_snapshot_may_link_to_nothing_but_its_own_blobs(snapshot: Path, target: str) -> None:
    (snapshot / "file").symlink_to(snapshot.parents[2] / target)
    assert not lies_within(snapshot / "file", snapshot)


def test_blobs_that_are_a_link_elsewhere_are_not_followed(snapshot: Path, tmp_path: Path) -> None:
    blobs = snapshot.parent.parent / "blobs"
    blobs.rename(tmp_path / "keys")
    blobs.symlink_to(tmp_path / "keys")
    (snapshot / "file").symlink_to("../../blobs/beef")
    assert not lies_within(snapshot / "file", snapshot)
