"""A folder appears complete or not at all, and nothing else is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import gradmerge as gm
from gradmerge.errors import InputError, MachineError
from gradmerge.io.atomic_dir import MARK, AtomicDir, require_space
from tests.making import near, random_state, weight_bytes, write_model


def fill(folder: Path, text: str = "x", name: str = "file") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder


def result(folder: Path, text: str) -> Path:
    """A folder as a merge leaves it."""
    return fill(fill(folder, text), "{}", "gradmerge.json")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def interrupted(out: Path, kind: str = "merge") -> Path:
    """Write to OUT until a process is killed; return the unfinished folder."""
    staging = AtomicDir(out, kind)
    fill(staging.folder / "inner")
    staging.close()
    return staging.folder


def test_the_folder_gets_its_name_when_it_is_complete(tmp_path: Path) -> None:
    out = tmp_path / "new" / "out"
    with AtomicDir(out, "merge") as staging:
        fill(staging.folder)
        assert not out.exists()
        with pytest.raises(InputError):  # locked
            AtomicDir(out, "merge", resume=True)
    assert names(tmp_path / "new") == ["out"] and names(out) == ["file"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_an_error_removes_the_folder_unless_keep_is_set(tmp_path: Path, error: type[BaseException]) -> None:
    def fail(keep: bool) -> None:
        with AtomicDir(tmp_path / "out", "merge") as staging:
            fill(staging.folder)
            staging.keep = keep
            raise error

    for keep in (False, True):
        with pytest.raises(error):
            fail(keep)
        assert names(tmp_path) == (["out.gradmerge-partial"] if keep else [])
    with AtomicDir(tmp_path / "out", "merge", resume=True) as staging:
        assert names(staging.folder) == [MARK, "file"]


def test_only_a_resumed_run_sees_what_an_earlier_one_left(tmp_path: Path) -> None:
    precious = fill(tmp_path / "mine")
    (interrupted(tmp_path / "out") / "link").symlink_to(precious)
    with AtomicDir(tmp_path / "out", "merge") as staging:
        assert names(staging.folder) == [MARK]
    assert names(precious) == ["file"]


def test_the_unfinished_folder_of_another_command_is_not_touched(tmp_path: Path) -> None:
    folder = interrupted(tmp_path / "out", "estimate of curvature")
    for resume in (False, True):
        with pytest.raises(InputError):
            AtomicDir(tmp_path / "out", "merge", resume=resume)
    assert names(folder) == [MARK, "inner"]


def test_force_replaces_a_result_once_the_new_one_is_complete(tmp_path: Path) -> None:
    out = result(tmp_path / "out", "old")
    with pytest.raises(InputError):
        AtomicDir(out, "merge")
    with AtomicDir(out, "merge", force=True) as staging:
        fill(staging.folder, "new")
        assert (out / "file").read_text() == "old"
    assert (out / "file").read_text() == "new" and names(tmp_path) == ["out"]


@pytest.mark.parametrize("files", [["mine"], ["curvature.safetensors", "model.safetensors"]])
def test_force_replaces_nothing_that_gradmerge_did_not_write(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        fill(tmp_path / "folder", name=name)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("folder", "file", "link", "dangling"):
        with pytest.raises(InputError):
            AtomicDir(tmp_path / name, "merge", force=True)
    assert names(tmp_path / "folder") == files


@pytest.mark.parametrize("files", [[], ["curvature.safetensors"], ["preview.json", "report.html"]])
def test_force_replaces_empty_folders_curvature_and_reports(tmp_path: Path, files: list[str]) -> None:
    (tmp_path / "out").mkdir()
    for name in files:
        fill(tmp_path / "out", name=name)
    with AtomicDir(tmp_path / "out", "merge", force=True) as staging:
        fill(staging.folder)
    assert names(tmp_path / "out") == ["file"]


@pytest.mark.parametrize("suffix", [".gradmerge-partial", ".gradmerge-replaced"])
@pytest.mark.parametrize("options", [{}, {"force": True}, {"resume": True}])
def test_foreign_folders_and_links_under_our_names_are_not_touched(
    tmp_path: Path, suffix: str, options: dict[str, bool]
) -> None:
    precious = fill(tmp_path / "mine")
    (tmp_path / f"out{suffix}").symlink_to(precious)
    with pytest.raises(InputError):
        AtomicDir(tmp_path / "out", "merge", **options)
    result(tmp_path / "new", "old")
    fill(tmp_path / f"new{suffix}")
    with pytest.raises(InputError):
        AtomicDir(tmp_path / "new", "merge", **options)
    assert names(precious) == names(tmp_path / f"new{suffix}") == ["file"] and not (tmp_path / "out").exists()


def test_a_folder_that_a_killed_process_moved_away_is_restored(tmp_path: Path) -> None:
    fill(tmp_path / "out.gradmerge-replaced", "old")
    with pytest.raises(InputError):
        AtomicDir(tmp_path / "out", "merge")
    assert names(tmp_path) == ["out"] and (tmp_path / "out" / "file").read_text() == "old"


def test_a_complete_result_is_kept_if_its_name_was_taken_meanwhile(tmp_path: Path) -> None:
    staging = AtomicDir(tmp_path / "out", "merge")
    fill(staging.folder, "new")
    fill(tmp_path / "out", "of another")
    with pytest.raises(MachineError), staging:
        pass
    assert (tmp_path / "out" / "file").read_text() == "of another"
    assert (tmp_path / "out.gradmerge-partial" / "file").read_text() == "new"


@pytest.mark.parametrize("suffix", ["", ".gradmerge-partial", ".gradmerge-replaced"])
def test_a_folder_that_contains_an_input_is_not_emptied(tmp_path: Path, suffix: str) -> None:
    state = random_state(0)
    base, tuned = write_model(tmp_path / f"out{suffix}" / "base", state), write_model(tmp_path / "a", near(state, 1))
    before = weight_bytes(base)
    for reference in (base, base / "model.safetensors"):
        recipe = {"method": "task-arithmetic", "base": str(reference), "models": [str(tuned)]}
        with pytest.raises(InputError):
            gm.merge(recipe, tmp_path / "out", force=True)
    assert weight_bytes(base) == before


def test_a_link_to_an_input_inside_out_is_not_removed(tmp_path: Path) -> None:
    out = result(tmp_path / "out", "old")
    (out / "base").symlink_to(fill(tmp_path / "elsewhere"))
    with pytest.raises(InputError):
        AtomicDir(out, "merge", force=True, reads=[out / "base"])


def test_the_working_directory_and_its_parents_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = fill(tmp_path / "a" / "b")
    monkeypatch.chdir(inner)
    for out in (Path(), inner, inner.parent, Path("..")):
        with pytest.raises(InputError):
            AtomicDir(out, "merge", force=True)
    assert names(inner) == ["file"]


def test_out_must_not_lie_in_an_input_unless_it_belongs_there(tmp_path: Path) -> None:
    model = fill(tmp_path / "model")
    (tmp_path / "link").symlink_to(model)
    for out in (model / "out", model / "deeper" / "out", tmp_path / "link" / "out"):
        with pytest.raises(InputError):
            AtomicDir(out, "merge", reads=[model])
    with AtomicDir(model / "curvature", "curvature", reads=[model, tmp_path / "data"], inside=[tmp_path / "link"]):
        pass
    assert names(model) == ["curvature", "file"]


@pytest.mark.parametrize("name", ["/", "x" * 300, "x" * 250, "file/out", "file/deeper/out"])
def test_an_impossible_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError):
        AtomicDir(tmp_path / name, "merge", force=True)
    assert names(tmp_path) == ["file"]


def test_too_little_space_is_an_error_before_anything_is_written(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    with AtomicDir(tmp_path / "out", "merge") as staging:
        require_space(staging.folder, free // 2)
        with pytest.raises(MachineError):
            require_space(staging.folder, 2 * free + 10**9)
