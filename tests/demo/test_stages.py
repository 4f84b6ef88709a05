"""Stages that are done are kept, and only what changed, with all that stands on it, is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gradmerge.demo.stages import LOCK, RECORDS, Advance, Stage, Stages, claimed, run_all, write_text
from gradmerge.errors import InputError


class Chain:
    """data → model → result, and another that stands on data alone."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[str] = []

    def stages(self, **facts: Any) -> list[Stage]:
        def stage(out: str, *needs: str) -> Stage:
            def make(advance: Advance) -> None:
                if facts.get(out) == "broken":
                    raise RuntimeError(out)
                self.made.append(out)
                write_text(self.folder / out, out)

            return Stage(out, make, needs, facts.get(out), steps=2)

        return [stage("data"), stage("model", "data"), stage("other", "data"), stage("result", "model")]

    def run(self, versions: Any = 1, force: bool = False, **facts: Any) -> tuple[int, list[str], int]:
        """How many were kept, what was made, and the steps that were told."""
        self.made = []
        steps: list[int] = []
        stages = Stages(self.folder, versions=versions, force=force)
        kept = run_all(stages, self.stages(**facts), steps.append, lambda text: None)
        return kept, self.made, sum(steps)


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    assert chain.run() == (0, ["data", "model", "other", "result"], 8)
    return chain


def test_what_is_done_is_kept_and_progress_still_reaches_its_end(chain: Chain) -> None:
    assert chain.run() == (4, [], 8)


def test_a_changed_setting_makes_its_stage_and_what_stands_on_it_again(chain: Chain) -> None:
    assert chain.run(model="new") == (2, ["model", "result"], 8)
    assert chain.run(model="new")[1] == []
    assert chain.run(data="new")[1] == ["data", "model", "other", "result"]


def test_other_versions_and_force_make_everything_again(chain: Chain) -> None:
    assert chain.run(versions=2)[1] == ["data", "model", "other", "result"]
    assert chain.run(versions=2, force=True)[1] == ["data", "model", "other", "result"]


def test_a_result_that_was_deleted_is_made_again(chain: Chain) -> None:
    (chain.folder / "other").unlink()
    assert chain.run()[1] == ["other"]


def test_a_run_that_failed_goes_on_at_the_stage_that_failed(chain: Chain) -> None:
    with pytest.raises(RuntimeError, match="other"):
        chain.run(data="new", other="broken")
    assert chain.run(data="new")[1] == ["other", "result"]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"stages": 3}'])
def test_a_record_that_cannot_be_read_counts_as_none(chain: Chain, text: str) -> None:
    for record in (chain.folder / RECORDS).iterdir():
        record.write_text(text)
    assert len(chain.run()[1]) == 4


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InputError, match="no folder of a demonstration"), claimed(tmp_path):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with pytest.raises(InputError, match="is no folder"), claimed(tmp_path / "thesis.txt"):
        pass


def test_a_folder_belongs_to_one_process_at_a_time_and_to_the_next_one_afterwards(tmp_path: Path) -> None:
    with claimed(tmp_path / "new"):
        with pytest.raises(InputError, match="another demonstration"), claimed(tmp_path / "new"):
            pass
    with claimed(tmp_path / "new"):
        assert (tmp_path / "new" / LOCK).exists()
