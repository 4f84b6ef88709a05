"""Files of data that were found to break something."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.errors import InputError
from gradmerge.tasks.data import read_rows

FILES = Path(__file__).parent / "files"


def test_statistics_of_a_parquet_file_that_do_not_fit_do_not_end_the_process() -> None:
    """The size of a column's histogram is wrong; pyarrow aborts when the column's metadata are asked for."""
    with pytest.raises(InputError, match="cannot be read"):
        read_rows(str(FILES / "histogram.parquet"))
