"""Links are followed inside a model's folder and into its Hub cache's blobs, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.storage.links import lies_within


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "inner").mkdir(parents=True)
    (folder / "file").touch()
    (tmp_path / "secret").touch()
    return folder


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    cache = tmp_path / "models--org--name"
    folder = cache / "snapshots" / "0123abc"
    (folder / "inner").mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "beef").touch()
    return folder


@pytest.mark.parametrize("name", ["file", "inner/file", "nothing/here"])
def test_what_lies_in_the_folder_is_inside(model: Path, name: str) -> None:
    assert lies_within(model / name, model)


@pytest.mark.parametrize("target", ["../secret", "/dev/zero", "..", "inner/../../secret", "../model-2/file", "loop"])
def test_a_link_out_of_the_folder_is_not(model: Path, target: str) -> None:
    link = model / "loop"
    link.symlink_to(target)
    assert not lies_within(link, model)


def test_a_link_within_the_folder_is_inside(model: Path) -> None:
    (model / "inner" / "again").symlink_to("../file")
    assert lies_within(model / "inner" / "again", model)


def test_a_chain_of_links_is_followed_to_its_end(model: Path) -> None:
    (model / "second").symlink_to("../secret")
    (model / "first").symlink_to("second")
    assert not lies_within(model / "first", model)


def test_a_file_in_a_linked_subfolder_is_where_that_folder_is(model: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (model / "linked").symlink_to("../elsewhere")
    assert not lies_within(model / "linked" / "file", model)


def test_the_folder_may_be_a_link_itself(model: Path, tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to("model")
    assert lies_within(tmp_path / "alias" / "file", tmp_path / "alias")
    assert lies_within(model / "file", tmp_path / "alias")


@pytest.mark.parametrize("place", ["file", "inner/file"])
def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs(snapshot: Path, place: str) -> None:
    link = snapshot / place
    link.symlink_to("../" * (place.count("/") + 2) + "blobs/beef")
    assert link.exists()
    assert lies_within(link, snapshot)
    assert lies_within(link, link.parent)


@pytest.mark.parametrize("blobs", [True, False])
def test_a_snapshot_may_link_to_nothing_but_its_own_blobs(snapshot: Path, tmp_path: Path, blobs: bool) -> None:
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "beef").touch()
    (tmp_path / "secret").touch()
    (snapshot / "file").symlink_to(other / "beef" if blobs else tmp_path / "secret")
    assert not lies_within(snapshot / "file", snapshot)


def test_blobs_that_are_a_link_elsewhere_are_not_followed(snapshot: Path, tmp_path: Path) -> None:
    blobs = snapshot.parent.parent / "blobs"
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "beef").touch()
    (blobs / "beef").unlink()
    blobs.rmdir()
    blobs.symlink_to(tmp_path / "keys")
    (snapshot / "file").symlink_to("../../blobs/beef")
    assert not lies_within(snapshot / "file", snapshot)


def test_a_plain_folder_has_no_blobs(model: Path, tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "beef").touch()
    (model / "link").symlink_to("../blobs/beef")
    assert not lies_within(model / "link", model)
