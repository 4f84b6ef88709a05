from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.engine.journal import Journal
from gradmerge.engine.statistics import Statistics
from gradmerge.errors import InputError


def test_a_journal_returns_the_statistics_and_the_finished_blocks(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    statistics = Statistics({"": [0.1, float("inf")]}, {"w": {"norms": [1.0, 2.0]}})
    journal.statistics(statistics)
    journal.blocks([0, 3])
    journal.close()
    finished = Journal(tmp_path, "one").load()
    assert finished is not None and finished.statistics == statistics and finished.blocks == {0, 3}


def test_a_journal_of_another_merge_or_another_boot_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine, blocks that the journal lists may be missing on disk."""
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.blocks([0])
    journal.close()
    with pytest.raises(InputError):
        Journal(tmp_path, "two").load()
    monkeypatch.setattr("gradmerge.engine.journal.boot_id", lambda: "another")
    assert Journal(tmp_path, "one").load() is None
