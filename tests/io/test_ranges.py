"""Files at a URL, read by ranges: the right bytes, each of them once, and clear words when that cannot be."""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from gradmerge.errors import InputError, MachineError
from gradmerge.io import download as fetching, range_reader as ranges, remote
from gradmerge.io.download import download_model
from gradmerge.io.reader import TensorFile
from gradmerge.io.remote import RemoteFile, local_copy
from gradmerge.urls import count_local_copies

from ..http_stand_in import Web, web_server


class Counted(RemoteFile):
    """A file in memory that notes the ranges it is asked for."""

    content: bytes
    asked: list[tuple[int, int]]

    def fetch(self, start: int, stop: int) -> bytes:
        self.asked.append((start, stop))
        return self.content[start:stop]


def counted(nbytes: int) -> Counted:
    content = random.Random(0).randbytes(nbytes)
    file = Counted(None, "x", "memory://x", nbytes, "")
    object.__setattr__(file, "content", content)
    object.__setattr__(file, "asked", [])
    return file


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "PIECE", 1000)
    monkeypatch.setattr(ranges, "HEAD", 100)
    monkeypatch.setattr(ranges, "SAMPLE", 0)


@pytest.mark.usefixtures("small_pieces")
def test_a_pass_of_small_reads_on_threads_fetches_every_byte_once_and_keeps_nothing() -> None:
    file = counted(50_000)
    reader = ranges.RangeReader(file)
    reader.cut([100, 130, 5_000, 30_000])
    blocks = iter([(start, min(start + 333, file.size)) for start in range(0, file.size, 333)])
    found, lock = {}, threading.Lock()

    def work() -> None:
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            reader.will_need(block[0], 2000)
            buffer = bytearray(block[1] - block[0])
            reader.read_into(memoryview(buffer), block[0])
            found[block] = bytes(buffer)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert b"".join(found[block] for block in sorted(found)) == file.content
    assert sum(stop - start for start, stop in file.asked) == file.size
    assert max(stop - start for start, stop in file.asked) < 2000
    assert not [key for key in ranges._pieces if key[0] is reader]


@pytest.mark.usefixtures("small_pieces")
def test_reads_anywhere_give_what_the_file_holds_and_memory_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "KEPT", 8)
    file, draw = counted(100_000), random.Random(1)
    reader = ranges.RangeReader(file)
    reader.cut([100, 40_000, 40_010, 90_000])
    for _ in range(300):
        start = draw.randrange(file.size)
        buffer = bytearray(draw.randrange(min(5_000, file.size - start) + 1))
        reader.read_into(memoryview(buffer), start)
        assert buffer == file.content[start : start + len(buffer)]
        assert len(ranges._pieces) <= 8 + ranges.AT_ONCE + ranges.AHEAD + 1 + 6 * count_local_copies()
    reader.close()
    assert not [key for key in ranges._pieces if key[0] is reader]


@pytest.mark.usefixtures("small_pieces")
def test_a_sample_takes_no_more_than_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "SAMPLE", 20)
    monkeypatch.setattr(ranges, "FAR", 500)
    file = counted(100_000)
    reader = ranges.RangeReader(file)
    reader.cut([100])
    buffer = bytearray(20)
    for start in range(2_000, 90_000, 10_000):
        reader.read_into(memoryview(buffer), start)
        assert buffer == file.content[start : start + 20]
    assert file.asked == [(0, 100), *((start, start + 20) for start in range(2_000, 90_000, 10_000))]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    with web_server() as found:
        found.files["m.safetensors"] = save({"w": torch.arange(50_000.0)})
        yield found


def opened(web: Web, name: str = "m.safetensors") -> TensorFile:
    remote._copies.clear()
    return TensorFile(local_copy(f"http://{web.address}/{name}"))


def values(file: TensorFile) -> torch.Tensor:
    buffer = bytearray(file.entries["w"].nbytes)
    file.read_into(memoryview(buffer), file.entries["w"].start)
    file.close()
    return torch.frombuffer(buffer, dtype=torch.float32)


def test_a_server_that_fails_now_and_then_is_asked_again(web: Web) -> None:
    web.failures = 2
    assert torch.equal(values(opened(web)), torch.arange(50_000.0))
    assert web.given["m.safetensors"] == len(web.files["m.safetensors"])
    web.failures = 10**6
    with pytest.raises(MachineError, match=r"/m\.safetensors.*503"):
        opened(web)
    with pytest.raises(MachineError, match=r"127\.0\.0\.1:9"):
        local_copy("http://127.0.0.1:9/m.safetensors")


def test_a_server_without_ranges_is_refused_and_not_read_to_the_end(web: Web) -> None:
    web.ranges = False
    with pytest.raises(InputError, match=r"m\.safetensors"):
        values(opened(web))


@pytest.mark.parametrize(("status", "kind"), [(401, InputError), (404, InputError), (500, MachineError)])
def test_what_a_server_answers_is_told_apart(web: Web, status: int, kind: type[Exception]) -> None:
    web.status = status
    with pytest.raises(kind, match=r"m\.safetensors"):
        opened(web)


def test_a_file_that_is_shorter_than_its_header_says_is_refused(web: Web) -> None:
    web.files["m.safetensors"] = web.files["m.safetensors"][:-4]
    with pytest.raises(InputError, match=r"m\.safetensors"):
        opened(web)


def test_a_file_that_shrinks_while_it_is_read_ends_the_work(web: Web) -> None:
    file = opened(web)
    web.files["m.safetensors"] = web.files["m.safetensors"][:150_000]
    with pytest.raises(MachineError, match=r"m\.safetensors"):
        values(file)


@pytest.mark.parametrize(("url", "named"), [
    ("s4://bucket/model", "'s3'"),
    ("gs://bucket/model", "gcsfs"),
    ("memory://no/such", "memory://no/such"),
    ("s3://bucket/model", r"gradmerge\[remote\]"),
])  # fmt: skip
def test_urls_that_cannot_be_opened_are_refused(url: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    for known in ("s3", "s3a"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, known, raising=False)
    with pytest.raises(InputError, match=named):
        local_copy(url)


@pytest.fixture
def folder() -> Iterator[str]:
    """A model's folder in memory, with names that no folder of this machine may have."""
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


def test_a_stand_in_holds_small_files_and_no_weights(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MAX_TOKENIZER", 200)
    place = local_copy(folder)
    names = {path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()}
    assert names == {"config.json", "model.safetensors", "big.txt", "data.jsonl", "1_Pooling/config.json"}
    assert (place / "config.json").read_text() == '{"model_type": "test"}' and place.name == "model"
    assert (place / "model.safetensors").stat().st_size == len(save({"w": torch.arange(5.0)}))
    with pytest.raises(SafetensorError):  # opening the stand-in without gradmerge finds no weights
        safe_open(place / "model.safetensors", "pt")
    assert (place / "big.txt").read_bytes()[:8] == b"\xff" * 8


def test_a_folder_with_more_than_small_files_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "MOST_BYTES", 100)
    with pytest.raises(InputError, match=folder):
        local_copy(folder)


def test_a_stand_in_is_made_anew_when_the_model_has_changed(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = local_copy(folder)
    assert local_copy(folder) == first
    monkeypatch.setattr(remote, "FRESH", -1.0)
    assert local_copy(folder) == first
    fsspec.filesystem("memory").pipe_file("/there/model/config.json", b'{"model_type": "other"}')
    assert (local_copy(folder) / "config.json").read_text() == '{"model_type": "other"}'


def test_a_model_that_is_run_is_fetched_whole_once(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path))
    place = download_model(folder)
    assert place.is_relative_to(tmp_path) and place.name == "model"
    assert (place / "model.safetensors").read_bytes() == save({"w": torch.arange(5.0)})
    assert folder in caplog.text
    monkeypatch.setattr(fetching, "download", None)
    assert download_model(folder) == place and [path.name for path in place.parent.iterdir()] == ["model"]
    with pytest.raises(InputError):
        download_model(f"{folder}/model.safetensors")
