from __future__ import annotations

from pathlib import Path

from gradmerge.engine.run.journal import Journal
from gradmerge.engine.run.statistics import Statistics


def test_units_made_with_a_guess_count_until_the_statistics_turn_out_to_be_others(tmp_path: Path) -> None:
    guess, right = (Statistics({"": [value]}) for value in (0.1, 0.2))
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.guess(guess)
    journal.units([0])
    finished = Journal(tmp_path, "one").load()
    assert finished is not None and finished.statistics is None
    assert finished.guess == guess and finished.units == {0}

    journal.statistics(guess)
    finished = Journal(tmp_path, "one").load()
    assert finished is not None and finished.statistics == guess and finished.units == {0}

    journal.close()
    journal.open(fresh=True)
    journal.guess(guess)
    journal.units([0])
    journal.statistics(right)
    journal.units([2])
    journal.close()
    finished = Journal(tmp_path, "one").load()
    assert finished is not None and finished.statistics == right and finished.units == {2}


def test_a_journal_of_another_merge_is_not_believed(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "one")
    assert not journal.belongs_to_another_merge()
    journal.open(fresh=True)
    journal.units([0])
    journal.close()
    other = Journal(tmp_path, "two")
    assert other.load() is None
    assert other.belongs_to_another_merge()
    journal.path.write_bytes(b"\x00\xff not a journal\n")
    assert other.load() is None
    assert not other.belongs_to_another_merge()


def test_a_journal_of_another_boot_is_not_believed(tmp_path: Path, monkeypatch) -> None:
    """After a crash of the machine, what the journal names need not be on the disk."""
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.units([0])
    journal.close()
    monkeypatch.setattr("gradmerge.engine.run.journal._boot", lambda: "another")
    after = Journal(tmp_path, "one")
    assert after.load() is None
    assert not after.belongs_to_another_merge()
