"""A set of safetensors files whose places are known beforehand, written block by block in any order."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import MachineError
from .reader import ITEM_SIZE, Entry, TensorFile, TensorInfo, header_bytes

Described = tuple[str, tuple[int, ...]]
"""dtype as in a safetensors header, and shape."""
Tensors = Mapping[str, Described]


def split_into_shards(tensors: Tensors, shard_size: int) -> list[dict[str, Described]]:
    """Consecutive runs of tensors, each at most ``shard_size`` bytes unless one tensor alone is larger.

    Inside a shard, tensors with wider elements come first, so that every tensor is aligned to its element size.
    """
    shards: list[dict[str, Described]] = [{}]
    used = 0
    for name, (dtype, shape) in tensors.items():
        nbytes = TensorInfo(dtype, shape).nbytes
        if shards[-1] and used + nbytes > shard_size:
            shards.append({})
            used = 0
        shards[-1][name] = (dtype, shape)
        used += nbytes
    return [dict(sorted(s.items(), key=lambda item: -ITEM_SIZE[item[1][0]])) for s in shards]


class ShardWriter:
    """Files ``STEM.safetensors``, or shards with an index in the Hugging Face layout, in a folder that exists.

    The header decides where every block goes, so that blocks may come in any order and from several threads, and the
    files end with the same bytes. A tensor FOLDER/NAME with one of ``folders`` goes to files in it, as NAME; they are
    called as ``folders`` says, which may also be said of "", this folder itself.
    """

    def __init__(
        self,
        folder: Path,
        stem: str,
        tensors: Tensors,
        shard_size: int,
        metadata: Mapping[str, str],
        folders: Mapping[str, str] | None = None,
    ) -> None:
        self.folder = folder
        self._stems = {f"{name}/": own for name, own in (folders or {}).items() if name}
        self._stems[""] = (folders or {}).get("", stem)
        self._headers: dict[str, bytes] = {}
        self._places: dict[str, tuple[str, Entry]] = {}
        self._indexes: dict[str, list[str]] = {}
        self.sizes: dict[str, int] = {}
        """Bytes of each file."""
        for prefix, group in _by_folder(tensors, self._stems).items():
            self._lay_out(prefix, group, shard_size, metadata)
        self._files = _OpenFiles(folder)
        self.gone: set[str] = set()
        """Files that are complete and have been sent elsewhere."""

    def _lay_out(self, prefix: str, tensors: Tensors, shard_size: int, metadata: Mapping[str, str]) -> None:
        shards = split_into_shards(tensors, shard_size)
        count = len(shards)
        for number, shard in enumerate(shards, 1):
            suffix = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
            filename = f"{prefix}{self._stems[prefix]}{suffix}.safetensors"
            self._headers[filename], entries = header_bytes(shard, metadata)
            self.sizes[filename] = len(self._headers[filename]) + sum(entry.nbytes for entry in entries.values())
            self._places |= {prefix + name: (filename, entry) for name, entry in entries.items()}
        if count > 1:
            self._indexes[prefix] = [prefix + name for name in tensors]

    @property
    def nbytes(self) -> int:
        """Size of all files together."""
        return sum(self.sizes.values())

    def open(self) -> bool:
        """Create the files at full size with their headers, or open those that an earlier run left.

        Says whether an earlier run had left all of them.
        """
        all_there = True
        for filename, header in self._headers.items():
            path = self.folder / filename
            if filename in self.gone:
                continue
            try:
                path.parent.mkdir(exist_ok=True)
                with self._files.opened(filename, create=True) as fd:
                    if os.fstat(fd).st_size != self.sizes[filename]:
                        os.ftruncate(fd, self.sizes[filename])
                        all_there = False
                    _write(fd, memoryview(header), 0)
            except OSError as error:
                raise MachineError(f"{path}: {error.strerror}") from error
        return all_there

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def place(self, name: str) -> tuple[str, int]:
        """The file of a tensor, and where in it the tensor begins."""
        filename, entry = self._places[name]
        return filename, entry.start

    def write(self, name: str, start: int, block: memoryview) -> None:
        """Put a block at element ``start`` of the flattened tensor."""
        filename, entry = self._places[name]
        try:
            with self._files.opened(filename) as fd:
                _write(fd, block, entry.start + start * ITEM_SIZE[entry.dtype])
        except OSError as error:
            raise MachineError(f"{self.folder / filename}: writing failed: {error.strerror}") from error

    def finish(self) -> None:
        """Write the indexes, close the files and read their headers back."""
        for prefix, names in self._indexes.items():
            total = sum(self._places[name][1].nbytes for name in names)
            files = {name: self._places[name][0] for name in sorted(names)}
            weight_map = {name.removeprefix(prefix): file.removeprefix(prefix) for name, file in files.items()}
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n"
            (self.folder / f"{prefix}{self._stems[prefix]}.safetensors.index.json").write_text(text, "utf-8")
        self.close()
        for filename in self._headers.keys() - self.gone:
            TensorFile(self.folder / filename).close()

    def release(self, filename: str) -> None:
        """Close a file that is complete, and leave it to others."""
        self.gone.add(filename)
        self._files.close_one(filename)

    def close(self, *, sync: bool = False) -> None:
        """Close the files; with ``sync``, flush them to the disk first."""
        try:
            self._files.close(sync)
        except OSError as error:
            raise MachineError(f"{self.folder}: writing failed: {error.strerror}") from error


class _OpenFiles:
    """Files to write to, of which a few are open at a time: a result may have more than a process may open."""

    most = 64

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._fds: dict[str, int] = {}
        """By name in the folder; the one that was used last comes last."""
        self._users: Counter[str] = Counter()

    @contextlib.contextmanager
    def opened(self, name: str, create: bool = False) -> Iterator[int]:
        """The descriptor of a file; it stays open at least as long as somebody uses it."""
        with self._lock:
            fd = self._fds.pop(name, -1)
            if fd < 0:
                self._close_idle(self.most - 1)
                # Not to read: on NFS, a client that may read takes whole pages for its own, and machines that write
                # to two ends of a page would undo each other's.
                fd = os.open(self._folder / name, os.O_WRONLY | (os.O_CREAT if create else 0), 0o666)
            self._fds[name] = fd
            self._users[name] += 1
        try:
            yield fd
        finally:
            with self._lock:
                self._users[name] -= 1

    def _close_idle(self, left: int) -> None:
        for name in [name for name in self._fds if not self._users[name]][: max(0, len(self._fds) - left)]:
            os.close(self._fds.pop(name))

    def close_one(self, name: str) -> None:
        with self._lock:
            if name in self._fds:
                os.close(self._fds.pop(name))

    def close(self, sync: bool = False) -> None:
        with self._lock:
            for fd in self._fds.values() if sync else ():
                os.fsync(fd)
            self._close_idle(0)


def _by_folder(tensors: Tensors, prefixes: Iterable[str]) -> dict[str, dict[str, Described]]:
    """The tensors of each folder, "" being the writer's own, by the names that they have in its files."""
    prefixes = sorted(prefixes, key=len, reverse=True)
    groups: dict[str, dict[str, Described]] = {}
    for name, described in tensors.items():
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        groups.setdefault(prefix, {})[name.removeprefix(prefix)] = described
    return groups or {"": {}}


def _write(fd: int, block: memoryview, offset: int) -> None:
    done = 0
    while done < len(block):
        done += os.pwrite(fd, block[done:], offset + done)
