"""Writing tensors by position, to many files at once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gradmerge.engine.thread_pool import run_parallel
from gradmerge.errors import MachineError
from gradmerge.io.reader import PositionalFile, TensorFile, bytes_of
from gradmerge.io.writer import ShardWriter

FILES = 300
FDS = Path("/proc/self/fd")


@pytest.mark.skipif(not FDS.is_dir(), reason="counts open files as Linux shows them")
def test_a_result_may_have_more_files_than_stay_open(tmp_path: Path) -> None:
    state = {f"t{i}": torch.randn(8, generator=torch.Generator().manual_seed(i)) for i in range(FILES)}
    writer = ShardWriter(tmp_path, "model", dict.fromkeys(state, ("F32", (8,))), 32, {"format": "pt"})
    before = len(list(FDS.iterdir()))
    assert not writer.open()
    open_files: list[int] = []

    def work(number: int) -> None:
        # Far from the order of the files, in two blocks of each.
        name = f"t{number * 7 % FILES}"
        half = number // FILES
        writer.write(name, 4 * half, bytes_of(state[name][4 * half : 4 * half + 4].contiguous()))
        open_files.append(len(list(FDS.iterdir())) - before)

    run_parallel(range(2 * FILES), lambda: work, 4)
    assert max(open_files) <= 64 + 4 + 4
    writer.finish()
    assert len(list(FDS.iterdir())) == before
    for i, filename in enumerate(writer.sizes):
        assert load_file(tmp_path / filename)[f"t{i}"].equal(state[f"t{i}"])


def test_a_file_that_vanished_is_not_made_anew(tmp_path: Path) -> None:
    tensors = {f"t{i}": ("F32", (1,)) for i in range(70)}
    writer = ShardWriter(tmp_path, "model", tensors, 4, {})
    writer.open()
    (tmp_path / next(iter(writer.sizes))).unlink()
    with pytest.raises(MachineError, match="00001-of-00070"):
        writer.write("t0", 0, bytes_of(torch.zeros(1)))
    writer.close()


def test_advice_that_the_file_system_does_not_take_is_no_failure(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    other = os.open(tmp_path / "pipe", os.O_RDWR)
    (tmp_path / "file").touch()
    file = PositionalFile(tmp_path / "file")
    os.dup2(other, file._fd)
    try:
        with pytest.raises(OSError) as refused:
            os.posix_fadvise(file._fd, 0, 10, os.POSIX_FADV_WILLNEED)
        assert refused.value.errno == errno.ESPIPE
        file.will_need(0, 10)
    finally:
        file.close()
        os.close(other)


def test_metadata_may_name_a_folder_that_is_not_utf8(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path, "model", {"a": ("F32", (1,))}, 100, {"model": "caf\udce9"})
    writer.open()
    writer.finish()
    assert TensorFile(tmp_path / "model.safetensors").metadata == {"model": "caf\\udce9"}
