"""A folder appears whole or not at all, and nothing else is lost on the way."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.errors import InputError, MachineError
from gradmerge.io.atomic_dir import MARK, AtomicDir
from tests.making import near, random_state, weight_bytes, write_model


def fill(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text(text)
    return folder


def ours(folder: Path, text: str) -> Path:
    """A folder as a merge leaves it."""
    fill(folder, text)
    (folder / "gradmerge.json").write_text("{}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_has_its_name_only_when_it_is_finished(tmp_path: Path) -> None:
    staging = AtomicDir(tmp_path / "new" / "out", "merge")
    fill(staging.folder, "x")
    assert not (tmp_path / "new" / "out").exists()
    staging.finish()
    assert names(tmp_path / "new") == ["out"] and (tmp_path / "new" / "out" / "file").read_text() == "x"


def test_what_was_left_is_kept_for_who_asks_and_removed_for_others(tmp_path: Path) -> None:
    staging = AtomicDir(tmp_path / "out", "merge")
    fill(staging.folder / "inner", "x")
    staging.leave()
    again = AtomicDir(tmp_path / "out", "merge", resume=True)
    assert names(again.folder) == [MARK, "inner"]
    again.leave()
    fresh = AtomicDir(tmp_path / "out", "merge")
    assert names(fresh.folder) == [MARK]
    fresh.discard()


def test_a_link_in_what_was_left_is_removed_and_not_followed(tmp_path: Path) -> None:
    mine = fill(tmp_path / "mine", "precious")
    left = AtomicDir(tmp_path / "out", "merge")
    (left.folder / "link").symlink_to(mine)
    left.leave()
    AtomicDir(tmp_path / "out", "merge").discard()
    assert (mine / "file").read_text() == "precious"


def test_two_cannot_write_to_one_place(tmp_path: Path) -> None:
    first = AtomicDir(tmp_path / "out", "merge")
    fill(first.folder, "x")
    for resume in (False, True):
        with pytest.raises(InputError, match="out"):
            AtomicDir(tmp_path / "out", "merge", resume=resume)
    first.finish()
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_a_folder_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = ours(tmp_path / "out", "old")
    for name in ("out.replaced", "out.old", "outer"):
        fill(tmp_path / name, "mine")
    before = names(tmp_path)
    with pytest.raises(InputError, match="out"):
        AtomicDir(out, "merge")
    assert names(tmp_path) == before
    staging = AtomicDir(out, "merge", force=True)
    fill(staging.folder, "new")
    assert (out / "file").read_text() == "old"
    staging.finish()
    assert (out / "file").read_text() == "new" and names(tmp_path) == before


def test_force_replaces_neither_files_nor_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(fill(tmp_path / "elsewhere", "mine"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with pytest.raises(InputError, match=name):
            AtomicDir(tmp_path / name, "merge", force=True)
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


@pytest.mark.parametrize("suffix", ["", ".gradmerge-partial", ".gradmerge-replaced"])
def test_a_folder_that_holds_an_input_is_not_emptied(tmp_path: Path, suffix: str) -> None:
    state = random_state(0)
    base, tuned = write_model(tmp_path / f"out{suffix}" / "base", state), write_model(tmp_path / "a", near(state, 1))
    before = weight_bytes(base)
    for recipe_base in (base, base / "model.safetensors"):
        recipe = {"method": "task-arithmetic", "base": str(recipe_base), "models": [str(tuned)]}
        with pytest.raises(InputError, match="base"):
            gm.merge(recipe, tmp_path / "out", force=True)
    assert weight_bytes(base) == before


def test_the_current_folder_and_those_above_it_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = fill(tmp_path / "a" / "b", "mine")
    monkeypatch.chdir(inner)
    for out in (Path(), inner, inner.parent, Path("..")):
        with pytest.raises(InputError):
            AtomicDir(out, "merge", force=True)
    assert (inner / "file").read_text() == "mine"


def test_a_folder_moved_away_by_a_killed_process_is_put_back(tmp_path: Path) -> None:
    fill(tmp_path / "out.gradmerge-replaced", "old")
    with pytest.raises(InputError, match="out"):
        AtomicDir(tmp_path / "out", "merge")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


def test_what_a_process_killed_at_the_very_end_left_does_not_stand_in_the_way(tmp_path: Path) -> None:
    ours(tmp_path / "out", "old")
    ours(tmp_path / "out.gradmerge-replaced", "older")
    staging = AtomicDir(tmp_path / "out", "merge", force=True)
    fill(staging.folder, "new")
    staging.finish()
    assert (tmp_path / "out" / "file").read_text() == "new" and names(tmp_path) == ["out"]


def test_a_finished_result_is_kept_when_its_name_was_taken_meanwhile(tmp_path: Path) -> None:
    staging = AtomicDir(tmp_path / "out", "merge")
    fill(staging.folder, "new")
    fill(tmp_path / "out", "of another")
    with pytest.raises(MachineError, match=r"out\.gradmerge-partial"):
        staging.finish()
    assert (tmp_path / "out" / "file").read_text() == "of another"
    assert (tmp_path / "out.gradmerge-partial" / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["/", "x" * 300, "x" * 250, "file/out", "file/deeper/out"])
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError):
            AtomicDir(tmp_path / name, "merge", force=force)
    assert names(tmp_path) == ["file"]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    staging = AtomicDir(tmp_path / "out", "merge")
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    staging.require_space(free // 2)
    with pytest.raises(MachineError):
        staging.require_space(2 * free + 10**9)
    staging.discard()


@pytest.mark.parametrize("suffix", [".gradmerge-partial", ".gradmerge-replaced"])
def test_links_in_the_way_are_refused_and_what_they_lead_to_is_not_touched(tmp_path: Path, suffix: str) -> None:
    mine = fill(tmp_path / "mine", "precious")
    (tmp_path / f"out{suffix}").symlink_to(mine)
    for options in ({}, {"force": True}, {"resume": True}):
        with pytest.raises(InputError, match=suffix):
            AtomicDir(tmp_path / "out", "merge", **options)
    assert names(mine) == ["file"] and not (tmp_path / "out").exists()


def test_a_folder_in_the_way_that_is_not_ours_is_not_emptied(tmp_path: Path) -> None:
    fill(tmp_path / "out.gradmerge-partial", "precious")
    for options in ({}, {"force": True}, {"resume": True}):
        with pytest.raises(InputError, match=r"out\.gradmerge-partial"):
            AtomicDir(tmp_path / "out", "merge", **options)
    ours(tmp_path / "new", "old")
    fill(tmp_path / "new.gradmerge-replaced", "precious")
    with pytest.raises(InputError, match=r"new\.gradmerge-replaced"):
        AtomicDir(tmp_path / "new", "merge", force=True)
    assert names(tmp_path / "out.gradmerge-partial") == names(tmp_path / "new.gradmerge-replaced") == ["file"]


def test_the_unfinished_work_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    staging = AtomicDir(tmp_path / "out", "measurement of diagonal curvature")
    fill(staging.folder, "hours of work")
    staging.leave()
    for kind in ("merge", "measurement of Gram matrices"):
        for resume in (False, True):
            with pytest.raises(InputError, match="measurement of diagonal curvature"):
                AtomicDir(tmp_path / "out", kind, resume=resume)
    assert names(staging.folder) == [MARK, "file"]


def test_force_replaces_only_what_gradmerge_wrote_or_what_is_empty(tmp_path: Path) -> None:
    for place, kept in (
        ("curvature", ["curvature.safetensors"]),
        ("report", ["preview.json", "report.html"]),
        ("empty", []),
    ):
        (tmp_path / place).mkdir()
        for name in kept:
            (tmp_path / place / name).touch()
        with AtomicDir(tmp_path / place, "merge", force=True) as staging:
            fill(staging.folder, "new")
        assert names(tmp_path / place) == ["file"]
    for place, kept in (("mine", ["precious"]), ("with weights", ["curvature.safetensors", "model.safetensors"])):
        (tmp_path / place).mkdir()
        for name in kept:
            (tmp_path / place / name).touch()
        with pytest.raises(InputError, match=place):
            AtomicDir(tmp_path / place, "merge", force=True)
        assert names(tmp_path / place) == kept


def test_the_result_may_not_lie_in_what_is_read_unless_it_belongs_there(tmp_path: Path) -> None:
    model = fill(tmp_path / "model", "weights")
    (tmp_path / "link").symlink_to(model)
    for out in (model / "out", model / "deeper" / "out", tmp_path / "link" / "out"):
        with pytest.raises(InputError, match="model"):
            AtomicDir(out, "merge", reads=[model])
    with AtomicDir(model / "curvature", "curvature", reads=[model, tmp_path / "data"], inside=[tmp_path / "link"]):
        pass
    assert names(model) == ["curvature", "file"]


def test_a_link_to_an_input_inside_of_out_is_not_removed(tmp_path: Path) -> None:
    elsewhere = fill(tmp_path / "elsewhere", "weights")
    out = ours(tmp_path / "out", "old")
    (out / "base").symlink_to(elsewhere)
    with pytest.raises(InputError, match="base"):
        AtomicDir(out, "merge", force=True, reads=[out / "base"])


def test_an_error_removes_what_was_written_and_releases_the_lock(tmp_path: Path) -> None:
    def write(error: type[BaseException], keep: bool = False) -> None:
        with AtomicDir(tmp_path / "out", "merge") as staging:
            fill(staging.folder, "x")
            staging.keep = keep
            raise error

    for error in (ValueError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            write(error)
        assert names(tmp_path) == []
    with pytest.raises(ValueError):
        write(ValueError, keep=True)
    with AtomicDir(tmp_path / "out", "merge", resume=True) as staging:
        assert names(staging.folder) == [MARK, "file"]


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL])
def test_a_file_system_without_locks_is_told_of_and_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("fcntl.flock", flock)
    with AtomicDir(tmp_path / "out", "merge") as staging:
        fill(staging.folder, "x")
    assert len(staging.notes) == 1 and names(tmp_path / "out") == ["file"]
