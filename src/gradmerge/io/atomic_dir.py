"""A folder that is written beside its final place and then renamed: it appears whole or not at all.

One at a URL is written in the cache, and sent (`io/upload.py`). Every command that writes a folder goes through
here, and says what it reads: nothing that is read, and nothing that gradmerge did not write, is ever replaced or
emptied.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import GradmergeError, InputError, MachineError
from ..text import size
from ..urls import UrlPath, output_path
from .small_files import read_json, read_start

if TYPE_CHECKING:
    from .upload import Upload

#: What follows OUT in the name of the folder that is written, and of one that is being replaced.
PARTIAL, REPLACED = ".gradmerge-partial", ".gradmerge-replaced"
#: Lies in an unfinished folder and says whose it is.
MARK = ".gradmerge"
#: Lies there too if OUT is a URL, and says what has been sent.
SENT = ".gradmerge-sent"
#: A folder that holds one of these sets of files was written by gradmerge: a merge or samples, reports, the demo.
OURS = (
    {"gradmerge.json"},
    {"report.html", "diagnosis.json"},
    {"report.html", "preview.json"},
    {"commands.sh", "results.json", "results.md"},
)
#: The only files that a curvature folder holds.
SUMS = (
    "curvature*.safetensors",
    "curvature.safetensors.index.json",
    "online.safetensors",
)
#: How a card begins that goes with them.
SUMS_CARD = b"---\ntags:\n- gradmerge\n- curvature\n"


class AtomicDir:
    """``OUT.gradmerge-partial`` while it is written, ``OUT`` once the ``with`` block ends well.

    ``kind`` says in a few words what is written. One process at a time may hold it. ``resume`` goes on with what an
    earlier, killed process of the same kind left there. ``reads`` is everything that is read: OUT may not be, hold or
    lie in any of it, but for the folders in ``inside``. If an error ends the block, what was
    written is removed, unless ``keep`` was set.
    """

    def __init__(
        self,
        out: Path,
        kind: str,
        *,
        force: bool = False,
        resume: bool = False,
        reads: Iterable[Path] = (),
        inside: Iterable[Path] = (),
    ) -> None:
        out = output_path(out)
        self.upload: Upload | None = None
        """What sends the files to a URL, if OUT is one."""
        if isinstance(out, UrlPath):
            from .upload import Upload

            self.upload = Upload(out)
        self.out = Path(os.path.abspath(out)) if self.upload is None else self.upload.out
        if not self.out.name:
            raise InputError(f"{out}: not a place to write to; name a new folder")
        beside = self.out if self.upload is None else self.upload.beside
        self.kind, self.force = kind, force
        self.keep = False
        """Whether an error leaves what was written, for a later run to go on with."""
        self.temporary = False
        """Whether nothing is left of it in the end, and the folder gets no name."""
        self.notes: list[str] = []
        self.folder = beside.with_name(beside.name + PARTIAL)
        self._replaced = beside.with_name(beside.name + REPLACED)
        self._lock = -1
        reads = list(reads)
        try:
            for folder in (self.folder, self._replaced):
                if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                    where = "where a folder of gradmerge's own would lie"
                    raise InputError(f"{folder}: is a link or a file, {where}. Move it away.")
                _check_loses_nothing(folder, [*reads, *_own_places()])
            if self.upload is None:
                check_output_path(self.out, reads, inside)
            else:
                self.upload.check(reads, inside)
            self._check_replaceable()
            self._lock_folder()
            # Only the process that holds the lock may look at what another one left.
            self._check_own()
            if not (self.folder / MARK).exists():
                (self.folder / MARK).write_text(json.dumps({"kind": kind}))
            self._recover()
            self._check_replaceable()
            if not resume:
                self.clear()
            if self.upload is not None:
                self.upload.reserve()
        except BaseException as error:
            if self._lock >= 0:
                if [path.name for path in self.folder.iterdir()] in ([], [MARK]):
                    self.discard()
                self._unlock()
            if isinstance(error, OSError):
                raise _cannot_write(self.folder, error) from error
            raise

    def __enter__(self) -> AtomicDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self.temporary:
                self.finish()
            elif kind is None or not self.keep:
                self.discard()
        finally:
            self._unlock()

    def _check_own(self) -> None:
        """Stop if the unfinished folder is not ours, or the unfinished work of another command."""
        if not (self.folder / MARK).is_file():  # one that is complete lacks it, if a kill came just before the rename
            if any(self.folder.iterdir()) and not _written_by_us(self.folder):
                foreign = f"{self.folder}: is in the way, and was not made by gradmerge"
                raise InputError(f"{foreign}. Move it away, or choose another place.")
            return
        try:
            kind = str(read_json(self.folder / MARK, 1000)["kind"])
        except (InputError, KeyError):  # the mark was not written to the end
            return
        if kind != self.kind:
            raise InputError(
                f"{self.folder}: holds an unfinished {kind}, and this is a {self.kind}. Finish that first, or choose "
                "another place; to give it up, remove the folder."
            )

    def _recover(self) -> None:
        """Put back a folder that a process killed between its two last renames had moved away."""
        if self.upload is None and self._replaced.exists():
            if not self.out.exists():
                self._replaced.rename(self.out)
            elif self.force:  # it was killed after both
                self._check_ours(self._replaced)
                shutil.rmtree(self._replaced, ignore_errors=True)

    def _check_replaceable(self) -> None:
        if self.upload is not None:
            self.upload.check_replaceable(self.force, self.folder, _are_ours)
            return
        if not self.out.exists() and not self.out.is_symlink():
            return
        if not self.force:
            raise InputError(f"{self.out}: exists already. Choose another place, or pass --force to replace it.")
        if not self.out.is_dir() or self.out.is_symlink():
            raise InputError(f"{self.out}: is no folder; --force replaces folders only")
        self._check_ours(self.out)

    def _check_ours(self, folder: Path) -> None:
        if any(folder.iterdir()) and not _written_by_us(folder):
            raise InputError(
                f"{folder}: was not written by gradmerge, and --force replaces only what was. Choose another place, "
                "or, if all that it holds may go, remove it yourself first."
            )

    def _lock_folder(self) -> None:
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        self.folder.mkdir(exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        taken = f"{self.folder}: another process is writing to it. Wait for it, or choose another place."
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                self._unlock()
                raise InputError(taken) from error
            no_locks = f"{self.folder.parent}: the file system has no locks ({error.strerror})"
            self.notes.append(f"{no_locks}; see to it that nothing else writes to {self.out}")
        if not self.folder.exists() or not os.path.samestat(os.fstat(self._lock), self.folder.lstat()):
            self._unlock()
            raise InputError(taken)

    def clear(self) -> None:
        """Remove what an earlier process left."""
        try:
            if self.upload is not None:
                self.upload.forget()
            for child in self.folder.iterdir():
                if child.name not in (MARK, SENT):
                    shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def sign(self, run: str) -> None:
        """Have the mark of the unfinished folder say who is at work there, for processes on other machines."""
        try:
            (self.folder / MARK).write_text(json.dumps({"kind": self.kind, "run": run}))
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def require_space(self, nbytes: int) -> None:
        """Fail at once if the disk cannot take ``nbytes`` more than the staging folder holds already."""
        require_space(self.folder, nbytes)

    def finish(self) -> None:
        """Give the folder its final name."""
        if self.upload is not None:
            self._send(self.upload)
            return
        replaces = self.out.exists() and self.force
        try:
            (self.folder / MARK).unlink(missing_ok=True)
            if replaces:
                self.out.rename(self._replaced)
            try:
                self.folder.rename(self.out)
            except OSError:
                if replaces:
                    self._replaced.rename(self.out)
                raise
        except OSError as error:
            raise MachineError(
                f"{self.out}: the result cannot be given this name: {error.strerror}. It is complete in {self.folder}."
            ) from error
        finally:
            self._unlock()
        if replaces:
            shutil.rmtree(self._replaced, ignore_errors=True)

    def _send(self, upload: Upload) -> None:
        try:
            upload.finish()
        except GradmergeError as error:
            upload.leave()
            rest = f"What has not arrived is in {self.folder}"
            advice = "the same command with --resume, if it has that, goes on"
            raise type(error)(f"{error}\n  {rest}; {advice}.") from None
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()

    def discard(self) -> None:
        """Remove what was written."""
        if self.upload is not None:
            self.upload.discard()
        try:
            shutil.rmtree(self.folder, ignore_errors=True)
        finally:
            self._unlock()
        if self.upload is not None:
            with contextlib.suppress(OSError):
                self.folder.parent.rmdir()

    def leave(self) -> None:
        """Keep what was written for a later run to go on with."""
        self._unlock()

    def _unlock(self) -> None:
        if self.upload is not None:
            self.upload.leave()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def require_space(folder: Path, nbytes: int) -> None:
    """Fail if the disk cannot take ``nbytes`` more than a folder holds already."""
    held = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(folder).free
    if nbytes - held > free:
        raise MachineError(f"{folder.parent}: the result takes {size(nbytes)}, but only {size(free)} are free")


def _written_by_us(folder: Path) -> bool:
    """Whether a folder is the result of a merge, a report, or curvature and nothing else."""
    names = {path.name for path in folder.iterdir()}
    if "README.md" in names and SUMS_CARD in read_start(folder / "README.md"):
        names.remove("README.md")
    return _are_ours(names)


def _are_ours(names: set[str]) -> bool:
    if any(marks <= names for marks in OURS):
        return True
    return bool(names) and all(any(fnmatchcase(name, known) for known in SUMS) for name in names)


def _check_loses_nothing(folder: Path, needed: Iterable[Path]) -> None:
    """Stop if a folder that is about to be emptied is, or holds, one of these."""
    here = _identity(folder)
    if here is None:
        return
    for path in needed:
        if any(_identity(above) == here for above in _upwards(path)):
            raise InputError(f"{folder}: holds {path}, which would be lost. Choose another place to write to.")


def check_output_path(out: Path, reads: Iterable[Path], inside: Iterable[Path] = ()) -> None:
    """Stop if a result would replace something that is read, or become part of it, but for the folders ``inside``."""
    out, reads = Path(os.path.abspath(out)), list(reads)
    _check_loses_nothing(out, [*reads, *_own_places()])
    fine = {_identity(path) for path in inside}
    above = {_identity(path) for path in _upwards(out)[1:]} - {None} - fine
    for path in reads:
        if path.is_dir() and _identity(path) in above:
            raise InputError(f"{out}: lies in {path}, which is read. Choose another place to write to.")


def _own_places() -> list[Path]:
    """What no command replaces, whatever it reads: the working directory and the user's home."""
    return [Path.cwd(), Path(os.path.expanduser("~"))]  # noqa: PTH111 - it never raises


def _upwards(path: Path) -> list[Path]:
    """A path and the folders above it, as it is written and as it is resolved."""
    written, resolved = Path(os.path.abspath(path)), path.resolve()
    return list(dict.fromkeys([written, resolved, *written.parents, *resolved.parents]))


def _identity(path: Path) -> tuple[int, int] | None:
    """What tells a file apart under all its names; None if there is nothing."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _cannot_write(path: Path, error: OSError) -> InputError | MachineError:
    """The user's error where another place would do, and the machine's otherwise."""
    elsewhere = "EACCES EPERM EROFS ENOTDIR EEXIST ENAMETOOLONG ENOTEMPTY ENOENT ELOOP"
    wrong_place = errno.errorcode.get(error.errno or 0) in elsewhere.split()
    return (InputError if wrong_place else MachineError)(f"{path}: cannot be written: {error.strerror or error}")
