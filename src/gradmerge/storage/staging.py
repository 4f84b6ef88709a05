"""A folder that is written beside its final place and then renamed: it appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError, MachineError
from ..words import size


class Staging:
    """``OUT.gradmerge-partial`` while it is written, ``OUT`` once it is done.

    One process at a time may hold it. ``keep=True`` goes on with what an earlier, killed process left there.
    """

    def __init__(self, out: Path, *, force: bool = False, keep: bool = False, inputs: Iterable[Path] = ()) -> None:
        self.out = Path(os.path.abspath(out))
        if not self.out.name:
            raise InputError(f"{out}: not a place to write to; name a new folder")
        self.folder = self.out.with_name(self.out.name + ".gradmerge-partial")
        self._replaced = self.out.with_name(self.out.name + ".gradmerge-replaced")
        self.force = force
        self._lock = -1
        needed = [*inputs, Path.cwd(), Path(os.path.expanduser("~"))]  # noqa: PTH111 - never raises
        try:
            for folder in (self.folder, self._replaced):
                _check_loses_nothing(folder, needed)
            self._check_replaceable(needed)
            self._lock_folder()
            # Only the process that holds the lock may look at what another one left.
            self._recover()
            self._check_replaceable(needed)
            if not keep:
                self.clear()
        except BaseException as error:
            if self._lock >= 0:
                with contextlib.suppress(OSError):  # it stays if there is something in it
                    self.folder.rmdir()
                self._unlock()
            if isinstance(error, OSError):
                raise _cannot_write(self.folder, error) from error
            raise

    def _recover(self) -> None:
        """Put back a folder that a process killed between its two last renames had moved away."""
        if self._replaced.exists():
            if not self.out.exists():
                self._replaced.rename(self.out)
            elif self.force:  # it was killed after both
                shutil.rmtree(self._replaced, ignore_errors=True)

    def _check_replaceable(self, needed: Iterable[Path]) -> None:
        if not self.out.exists() and not self.out.is_symlink():
            return
        if not self.force:
            raise InputError(f"{self.out}: exists already. Choose another place, or pass --force to replace it.")
        if not self.out.is_dir() or self.out.is_symlink():
            raise InputError(f"{self.out}: is no folder; --force replaces folders only")
        _check_loses_nothing(self.out, needed)

    def _lock_folder(self) -> None:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            self._lock = -1
            raise InputError(
                f"{self.folder}: another process is writing to it. Wait for it, or choose another place."
            ) from error

    def clear(self) -> None:
        """Remove what an earlier process left, and make sure that the folder can be written to."""
        try:
            for child in self.folder.iterdir():
                shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
            probe = self.folder / ".probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def require_space(self, nbytes: int) -> None:
        """Fail at once if the disk cannot take ``nbytes`` more than the staging folder holds already."""
        require_space(self.folder, nbytes)

    def finish(self) -> None:
        """Give the folder its final name."""
        replaces = self.out.exists() and self.force
        try:
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

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._unlock()

    def leave(self) -> None:
        """Keep what was written for a later run to go on with."""
        self._unlock()

    def _unlock(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def require_space(folder: Path, nbytes: int) -> None:
    """Fail if the disk cannot take ``nbytes`` more than a folder holds already."""
    held = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(folder).free
    if nbytes - held > free:
        raise MachineError(f"{folder.parent}: the result takes {size(nbytes)}, but only {size(free)} are free")


def _check_loses_nothing(folder: Path, needed: Iterable[Path]) -> None:
    """Stop if a folder that is about to be emptied is, or holds, one of these."""
    if not folder.exists():
        return
    here = folder.resolve()
    for path in needed:
        resolved = path.resolve()
        if here == resolved or here in resolved.parents:
            raise InputError(f"{folder}: holds {path}, which would be lost. Choose another place to write to.")


def _cannot_write(path: Path, error: OSError) -> InputError | MachineError:
    message = f"{path}: cannot be written: {error.strerror or error}"
    wrong_place = error.errno in (
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.ENOENT,
    )  # fmt: skip
    return InputError(message) if wrong_place else MachineError(message)
