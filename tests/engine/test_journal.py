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


def test_a_journal_with_a_damaged_line_is_not_used(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.blocks([10, 11])
    journal.close()
    journal.path.write_bytes(journal.path.read_bytes().replace(b"\n11 ", b"\n12 "))
    assert Journal(tmp_path, "one").load() is None


def test_a_journal_of_another_merge_is_not_believed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.blocks([0])
    journal.close()
    other = Journal(tmp_path, "two")
    with pytest.raises(InputError):
        other.load()
    journal.path.write_bytes(b"\x00\xff not a journal\n")
    assert other.load() is None


def test_a_journal_of_another_boot_is_not_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash of the machine, what the journal names need not be on the disk."""
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.blocks([0])
    journal.close()
    monkeypatch.setattr("gradmerge.engine.journal.boot_id", lambda: "another")
    assert Journal(tmp_path, "one").load() is None
