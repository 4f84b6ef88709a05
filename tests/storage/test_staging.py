"""A folder appears whole or not at all, and nothing else is lost on the way."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.errors import InputError, MachineError
from gradmerge.storage.staging import Staging
from tests.making import near, random_state, weight_bytes, write_model


def fill(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "file").write_text(text)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_folder_has_its_name_only_when_it_is_finished(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "new" / "out")
    fill(staging.folder, "x")
    assert not (tmp_path / "new" / "out").exists()
    staging.finish()
    assert names(tmp_path / "new") == ["out"] and (tmp_path / "new" / "out" / "file").read_text() == "x"


def test_discarded_work_leaves_nothing(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "out")
    fill(staging.folder, "x")
    staging.discard()
    assert names(tmp_path) == []


def test_what_was_left_is_kept_for_who_asks_and_removed_for_others(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "out")
    fill(staging.folder / "inner", "x")
    staging.leave()
    again = Staging(tmp_path / "out", keep=True)
    assert names(again.folder) == ["inner"]
    again.leave()
    fresh = Staging(tmp_path / "out")
    assert names(fresh.folder) == []
    fresh.discard()


def test_a_link_in_what_was_left_is_removed_and_not_followed(tmp_path: Path) -> None:
    mine = fill(tmp_path / "mine", "precious")
    (tmp_path / "out.gradmerge-partial").mkdir()
    (tmp_path / "out.gradmerge-partial" / "link").symlink_to(mine)
    Staging(tmp_path / "out").discard()
    assert (mine / "file").read_text() == "precious"


def test_two_cannot_write_to_one_place(tmp_path: Path) -> None:
    first = Staging(tmp_path / "out")
    fill(first.folder, "x")
    for keep in (False, True):
        with pytest.raises(InputError, match="another process"):
            Staging(tmp_path / "out", keep=keep)
    first.finish()
    assert (tmp_path / "out" / "file").read_text() == "x"


def test_a_folder_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = fill(tmp_path / "out", "old")
    with pytest.raises(InputError, match="exists already"):
        Staging(out)
    assert names(tmp_path) == ["out"]
    staging = Staging(out, force=True)
    fill(staging.folder, "new")
    assert (out / "file").read_text() == "old"
    staging.finish()
    assert (out / "file").read_text() == "new" and names(tmp_path) == ["out"]


def test_force_replaces_neither_files_nor_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(fill(tmp_path / "elsewhere", "mine"))
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("file", "link", "dangling"):
        with pytest.raises(InputError, match="replaces folders only"):
            Staging(tmp_path / name, force=True)
    assert (tmp_path / "elsewhere" / "file").read_text() == "mine"


@pytest.mark.parametrize("suffix", ["", ".gradmerge-partial", ".gradmerge-replaced"])
def test_a_folder_that_holds_an_input_is_not_emptied(tmp_path: Path, suffix: str) -> None:
    state = random_state(0)
    base, tuned = write_model(tmp_path / f"out{suffix}" / "base", state), write_model(tmp_path / "a", near(state, 1))
    before = weight_bytes(base)
    for recipe_base in (base, base / "model.safetensors"):
        recipe = {"method": "task-arithmetic", "base": str(recipe_base), "models": [str(tuned)]}
        with pytest.raises(InputError, match="would be lost"):
            gm.merge(recipe, tmp_path / "out", force=True)
    assert weight_bytes(base) == before


def test_the_current_folder_and_those_above_it_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = fill(tmp_path / "a" / "b", "mine")
    monkeypatch.chdir(inner)
    for out in (Path(), inner, inner.parent, Path("..")):
        with pytest.raises(InputError, match="would be lost"):
            Staging(out, force=True)
    assert (inner / "file").read_text() == "mine"


def test_a_folder_moved_away_by_a_killed_process_is_put_back(tmp_path: Path) -> None:
    fill(tmp_path / "out.gradmerge-replaced", "old")
    with pytest.raises(InputError, match="exists already"):
        Staging(tmp_path / "out")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


def test_what_a_process_killed_at_the_very_end_left_does_not_stand_in_the_way(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    fill(tmp_path / "out.gradmerge-replaced", "older")
    staging = Staging(tmp_path / "out", force=True)
    fill(staging.folder, "new")
    staging.finish()
    assert (tmp_path / "out" / "file").read_text() == "new" and names(tmp_path) == ["out"]


def test_folders_that_only_look_like_leftovers_stay(tmp_path: Path) -> None:
    for name in ("out.replaced", "out.old", "outer"):
        fill(tmp_path / name, "mine")
    staging = Staging(tmp_path / "out")
    staging.finish()
    assert names(tmp_path) == ["out", "out.old", "out.replaced", "outer"]


def test_a_finished_result_is_kept_when_its_name_was_taken_meanwhile(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "out")
    fill(staging.folder, "new")
    fill(tmp_path / "out", "of another")
    with pytest.raises(MachineError, match=r"complete in .*out\.gradmerge-partial"):
        staging.finish()
    assert (tmp_path / "out" / "file").read_text() == "of another"
    assert (tmp_path / "out.gradmerge-partial" / "file").read_text() == "new"


@pytest.mark.parametrize("name", ["/", "x" * 300, "x" * 250, "file/out", "file/deeper/out"])
def test_a_place_that_cannot_be_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    for force in (False, True):
        with pytest.raises(InputError):
            Staging(tmp_path / name, force=force)
    assert names(tmp_path) == ["file"]


def test_too_little_space_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    staging = Staging(tmp_path / "out")
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    staging.require_space(free // 2)
    with pytest.raises(MachineError, match="GB are free"):
        staging.require_space(2 * free + 10**9)
    staging.discard()
