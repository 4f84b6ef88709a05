"""Files at URLs: read by ranges, with retries, and without storing the model."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gradmerge.engine.executor import run_parallel
from gradmerge.errors import InputError, MachineError
from gradmerge.io import range_reader, remote
from gradmerge.io.reader import TensorFile
from gradmerge.io.remote import RemoteFile, download_url, local_copy
from gradmerge.urls import count_local_copies

from ..http_stand_in import Web, web_server


class CountedFile(RemoteFile):
    """A file in memory that records the requested ranges."""

    content = random.Random(0).randbytes(100_000)
    requests: ClassVar[list[tuple[int, int]]] = []

    def fetch(self, start: int, stop: int) -> bytes:
        self.requests.append((start, stop))
        return self.content[start:stop]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path))
    remote._copies.clear()


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> CountedFile:
    monkeypatch.setattr(range_reader, "PIECE", 1000)
    monkeypatch.setattr(range_reader, "HEAD", 100)
    monkeypatch.setattr(range_reader, "SAMPLE", 0)
    CountedFile.requests.clear()
    return CountedFile(None, "x", "memory://x", len(CountedFile.content), "")


def test_threads_that_read_a_file_in_order_download_each_byte_once(
    file: CountedFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "MIN_PIECES", 200)  # a thread may be delayed while the others go on
    reader = range_reader.RangeReader(file)
    blocks = {}

    def read(start: int, _: object) -> None:
        buffer = bytearray(min(333, file.size - start))
        reader.read_into(memoryview(buffer), start)
        blocks[start] = bytes(buffer)

    run_parallel(range(0, file.size, 333), read, 4)
    assert b"".join(blocks[start] for start in sorted(blocks)) == file.content
    assert sum(stop - start for start, stop in file.requests) == file.size
    assert max(stop - start for start, stop in file.requests) == 1000


def test_random_reads_are_right_and_memory_is_bounded(file: CountedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "MIN_PIECES", 8)
    reader, draw = range_reader.RangeReader(file), random.Random(1)
    limit = max(8, 6 * count_local_copies()) + range_reader.PARALLEL + 1 + range_reader.AHEAD
    for _ in range(300):
        start = draw.randrange(file.size)
        buffer = bytearray(draw.randrange(min(5_000, file.size - start) + 1))
        reader.read_into(memoryview(buffer), start)
        assert buffer == file.content[start : start + len(buffer)]
        assert len(range_reader._pieces) <= limit
    reader.close()
    assert not [key for key in range_reader._pieces if key[0] is reader]


def test_scattered_small_reads_download_nothing_else(file: CountedFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "SAMPLE", 20)
    monkeypatch.setattr(range_reader, "JUMP", 500)
    reader = range_reader.RangeReader(file)
    buffer = bytearray(20)
    for start in range(2_000, 90_000, 10_000):
        reader.read_into(memoryview(buffer), start)
        assert buffer == file.content[start : start + 20]
    assert file.requests == [(0, 100), *((start, start + 20) for start in range(2_000, 90_000, 10_000))]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    with web_server() as web:
        web.files["m.safetensors"] = save({"w": torch.arange(50_000.0)})
        yield web


def opened(web: Web) -> TensorFile:
    remote._copies.clear()
    return TensorFile(local_copy(f"http://{web.address}/m.safetensors"))


def values(file: TensorFile) -> torch.Tensor:
    buffer = bytearray(file.entries["w"].nbytes)
    file.read_into(memoryview(buffer), file.entries["w"].start)
    file.close()
    return torch.frombuffer(buffer, dtype=torch.float32)


def test_failed_requests_are_repeated(web: Web) -> None:
    web.failures = 2
    assert torch.equal(values(opened(web)), torch.arange(50_000.0))
    assert web.given["m.safetensors"] == len(web.files["m.safetensors"])
    web.failures = 10**6
    with pytest.raises(MachineError, match="503"):
        opened(web)
    with pytest.raises(MachineError):
        local_copy("http://127.0.0.1:9/m.safetensors")


def test_a_server_without_ranges_is_refused(web: Web) -> None:
    web.ranges = False
    with pytest.raises(InputError):
        values(opened(web))


@pytest.mark.parametrize(("status", "kind"), [(401, InputError), (404, InputError), (500, MachineError)])
def test_the_status_of_a_server_decides_the_kind_of_error(web: Web, status: int, kind: type[Exception]) -> None:
    web.status = status
    with pytest.raises(kind, match=r"m\.safetensors"):
        opened(web)


def test_truncated_files_are_refused(web: Web) -> None:
    whole = web.files["m.safetensors"]
    web.files["m.safetensors"] = whole[:-4]
    with pytest.raises(InputError):
        opened(web)
    web.files["m.safetensors"] = whole
    file = opened(web)
    web.files["m.safetensors"] = whole[:150_000]
    with pytest.raises(MachineError):
        values(file)


@pytest.mark.parametrize("url", ["s4://bucket/model", "gs://bucket/model", "memory://no/such", "s3://bucket/model"])
def test_urls_that_cannot_be_opened_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for known in ("s3", "s3a"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, known, raising=False)
    with pytest.raises(InputError):
        local_copy(url)


@pytest.fixture
def folder() -> Iterator[str]:
    """A model folder in memory, with names that a local folder must not have."""
    fs = fsspec.filesystem("memory")
    for name, content in {
        "config.json": b'{"model_type": "test"}',
        "model.safetensors": save({"w": torch.arange(5.0)}),
        "big.txt": b"x" * 300,
        "data.jsonl": b"{}",
        "1_Pooling/config.json": b"{}",
        "deep/er/config.json": b"{}",
        "checkpoint-3/config.json": b"{}",
        "bad\\name.json": b"{}",
    }.items():
        fs.pipe_file(f"/there/model/{name}", content)
    yield "memory://there/model"
    fs.rm("/there", recursive=True)
    remote._copies.clear()


def test_a_local_copy_holds_small_files_and_placeholders(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_TOKENIZER", 200)
    path = local_copy(folder)
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert names == {"config.json", "model.safetensors", "big.txt", "data.jsonl", "1_Pooling/config.json"}
    assert (path / "config.json").read_text() == '{"model_type": "test"}' and path.name == "model"
    assert (path / "model.safetensors").stat().st_size == len(save({"w": torch.arange(5.0)}))
    assert (path / "big.txt").read_bytes()[:8] == b"\xff" * 8
    with pytest.raises(SafetensorError):
        safe_open(path / "model.safetensors", "pt")


def test_a_changed_model_gets_a_new_local_copy(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = local_copy(folder)
    monkeypatch.setattr(remote, "FRESH", -1.0)
    assert local_copy(folder) == first
    fsspec.filesystem("memory").pipe_file("/there/model/config.json", b'{"model_type": "other"}')
    assert (local_copy(folder) / "config.json").read_text() == '{"model_type": "other"}'


def test_a_model_that_is_run_is_downloaded_once(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = download_url(folder)
    assert path.is_relative_to(tmp_path) and path.name == "model" and folder in caplog.text
    assert (path / "model.safetensors").read_bytes() == save({"w": torch.arange(5.0)})
    remote._copies.clear()
    monkeypatch.setattr(RemoteFile, "fetch", None)
    assert download_url(folder) == path == local_copy(folder)
    assert [child.name for child in path.parent.iterdir()] == ["model"]
