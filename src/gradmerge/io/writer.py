"""Write safetensors files block by block, in any order."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ..errors import MachineError
from .reader import ITEM_SIZE, Entry, TensorFile, TensorInfo

Tensors = Mapping[str, TensorInfo]


def split_into_shards(tensors: Tensors, shard_size: int) -> list[dict[str, TensorInfo]]:
    """Split tensors, in their order, into shards of at most ``shard_size`` bytes, or of one larger tensor.

    In each shard, tensors with wider elements come first, which aligns every tensor to its element size.
    """
    shards: list[dict[str, TensorInfo]] = [{}]
    used = 0
    for name, info in tensors.items():
        if shards[-1] and used + info.nbytes > shard_size:
            shards.append({})
            used = 0
        shards[-1][name] = info
        used += info.nbytes
    return [dict(sorted(shard.items(), key=lambda item: -ITEM_SIZE[item[1].dtype])) for shard in shards]


def header_bytes(tensors: Tensors, metadata: Mapping[str, str]) -> tuple[bytes, dict[str, Entry]]:
    """Return the header of a file with these tensors in this order, and their entries."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    begins: dict[str, int] = {}
    end = 0
    for name, info in tensors.items():
        begins[name], end = end, end + info.nbytes
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [begins[name], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    entries = {name: Entry(info.dtype, info.shape, 8 + len(text) + begins[name]) for name, info in tensors.items()}
    return len(text).to_bytes(8, "little") + text, entries


class ShardWriter:
    """Writes ``STEM.safetensors``, or shards and an index in the Hugging Face layout, to an existing folder.

    The layout is fixed in advance. Blocks may therefore be written in any order and from several threads, and the
    files are always the same.

    Args:
        folder: Where to write.
        stem: The name of the files.
        tensors: All tensors by name, in the order of the files.
        shard_size: Bytes of a file.
        metadata: Header metadata of each file.
        folders: Subfolders. The tensor SUBFOLDER/NAME is written to its files as NAME.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        tensors: Tensors,
        shard_size: int,
        metadata: Mapping[str, str],
        folders: Iterable[str] = (),
    ) -> None:
        self.folder = folder
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        self.uploaded: set[str] = set()
        """Complete files that were uploaded and deleted."""
        self._headers: dict[str, bytes] = {}
        self._entries: dict[str, tuple[str, Entry]] = {}
        """Tensor → file and entry in it."""
        self._indexes: dict[str, dict[str, Any]] = {}
        self._fds: dict[str, int] = {}
        self._lock = threading.Lock()
        for prefix, group in _by_folder(tensors, [f"{name}/" for name in folders]).items():
            self._lay_out(prefix, stem, group, shard_size, metadata)

    def _lay_out(self, prefix: str, stem: str, tensors: Tensors, shard_size: int, metadata: Mapping[str, str]) -> None:
        shards = split_into_shards(tensors, shard_size)
        weight_map: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, 1):
            suffix = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            filename = f"{stem}{suffix}.safetensors"
            header, entries = header_bytes(shard, metadata)
            nbytes = sum(entry.nbytes for entry in entries.values())
            self._headers[prefix + filename] = header
            self.sizes[prefix + filename] = len(header) + nbytes
            self._entries |= {prefix + name: (prefix + filename, entry) for name, entry in entries.items()}
            weight_map |= dict.fromkeys(entries, filename)
            total += nbytes
        if len(shards) > 1:
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
            self._indexes[f"{prefix}{stem}.safetensors.index.json"] = index

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(self.sizes.values())

    def __enter__(self) -> ShardWriter:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> bool:
        """Create the files at full size with their headers. Return whether an earlier run left all of them."""
        complete = True
        for filename in self._headers:
            path = self.folder / filename
            try:
                path.parent.mkdir(exist_ok=True)
                fd = self._fd(filename, os.O_CREAT)
                if os.fstat(fd).st_size != self.sizes[filename]:
                    os.ftruncate(fd, self.sizes[filename])
                    complete = False
                _write(fd, memoryview(self._headers[filename]), 0)
                self.close_file(filename)  # a result may have more files than a process may open
            except OSError as error:
                raise MachineError(f"{path}: {error.strerror}") from error
        return complete

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def locate(self, name: str) -> tuple[str, int]:
        """Return the file of a tensor, and its first byte in the file."""
        filename, entry = self._entries[name]
        return filename, entry.start

    def write(self, name: str, start: int, block: memoryview) -> None:
        """Write a block that begins at element ``start`` of the flattened tensor. Thread-safe."""
        filename, entry = self._entries[name]
        try:
            _write(self._fd(filename), block, entry.start + start * ITEM_SIZE[entry.dtype])
        except OSError as error:
            raise MachineError(f"{self.folder / filename}: writing failed: {error.strerror}") from error

    def _fd(self, filename: str, flags: int = 0) -> int:
        with self._lock:
            if filename not in self._fds:
                # Write only: an NFS client that may read caches whole pages, and machines that write to the two ends
                # of a page would overwrite each other's blocks.
                self._fds[filename] = os.open(self.folder / filename, os.O_WRONLY | os.O_CLOEXEC | flags, 0o666)
            return self._fds[filename]

    def finish(self) -> None:
        """Write the indexes, close the files and check their headers."""
        for filename, index in self._indexes.items():
            (self.folder / filename).write_text(json.dumps(index, indent=2) + "\n", "utf-8")
        self.close()
        for filename in self._headers.keys() - self.uploaded:
            TensorFile(self.folder / filename).close()

    def close_file(self, filename: str) -> None:
        """Close a file to which no other thread is writing. A later write opens it again."""
        with self._lock:
            if filename in self._fds:
                os.close(self._fds.pop(filename))

    def close(self, *, sync: bool = False) -> None:
        """Close the files. With ``sync``, flush them to the disk first."""
        with self._lock:
            fds, self._fds = self._fds, {}
        try:
            for fd in fds.values() if sync else ():
                os.fsync(fd)
        except OSError as error:
            raise MachineError(f"{self.folder}: writing failed: {error.strerror}") from error
        finally:
            for fd in fds.values():
                os.close(fd)


def _by_folder(tensors: Tensors, prefixes: Iterable[str]) -> dict[str, dict[str, TensorInfo]]:
    """Return the tensors of each subfolder, by their names in its files."""
    prefixes = sorted(prefixes, key=len, reverse=True)
    groups: dict[str, dict[str, TensorInfo]] = {}
    for name, info in tensors.items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        groups.setdefault(prefix, {})[name.removeprefix(prefix)] = info
    return groups or {"": {}}


def _write(fd: int, block: memoryview, offset: int) -> None:
    done = 0
    while done < len(block):
        done += os.pwrite(fd, block[done:], offset + done)
