from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.engine.output import Journal
from gradmerge.errors import InputError


def test_a_journal_of_another_merge_or_another_boot_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash of the machine, blocks that the journal lists may be missing on disk."""
    journal = Journal(tmp_path, "one")
    journal.open(fresh=True)
    journal.add([0])
    journal.close()
    assert Journal(tmp_path, "one").load() == {0}
    with pytest.raises(InputError):
        Journal(tmp_path, "two").load()
    monkeypatch.setattr("gradmerge.engine.output.boot_id", lambda: "another")
    assert Journal(tmp_path, "one").load() == set()
