"""A folder that is written beside its final place and then renamed: it appears whole or not at all."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError, MachineError

try:
    import fcntl
except ImportError:  # pragma: no cover - not a POSIX system
    fcntl = None  # type: ignore[assignment]


class Staging:
    """``OUT.partial`` while it is written, ``OUT`` once it is done.

    One process at a time may hold it. ``keep=True`` goes on with what an earlier, killed process left there.
    """

    def __init__(self, out: Path, *, force: bool = False, keep: bool = False, inputs: Iterable[Path] = ()) -> None:
        self.out = Path(os.path.abspath(out))
        self.folder = self.out.with_name(self.out.name + ".partial")
        self._replaced = self.out.with_name(self.out.name + ".replaced")
        self.force = force
        self._lock = -1
        self._recover()
        if not self.out.name:
            raise InputError(f"{out}: not a place to write to; name a new folder")
        if self.out.exists() or self.out.is_symlink():
            self._check_replaceable(inputs)
        self._create(keep)

    def _recover(self) -> None:
        """Put back a folder that a process killed between its two last renames had moved away."""
        if self._replaced.exists() and not self.out.exists():
            self._replaced.rename(self.out)

    def _check_replaceable(self, inputs: Iterable[Path]) -> None:
        if not self.force:
            raise InputError(f"{self.out}: exists already. Choose another place, or pass --force to replace it.")
        if not self.out.is_dir() or self.out.is_symlink():
            raise InputError(f"{self.out}: is no folder; --force replaces folders only")
        here = self.out.resolve()
        for path in (*inputs, Path.cwd(), Path.home()):
            resolved = path.resolve()
            if here == resolved or here in resolved.parents:
                raise InputError(f"{self.out}: holds {path}, which would be lost. Choose another place to write to.")

    def _create(self, keep: bool) -> None:
        try:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder, os.O_RDONLY)
        except OSError as error:
            raise _cannot_write(self.folder, error) from error
        if fcntl is not None:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                os.close(self._lock)
                self._lock = -1
                raise InputError(
                    f"{self.folder}: another process is writing to it. Wait for it, or choose another place."
                ) from error
        if not keep:
            try:
                for child in self.folder.iterdir():
                    shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
                probe = self.folder / ".probe"
                probe.touch()
                probe.unlink()
            except OSError as error:
                self._unlock()
                raise _cannot_write(self.folder, error) from error

    def require_space(self, nbytes: int) -> None:
        """Fail at once if the disk cannot take ``nbytes`` more than the staging folder holds already."""
        held = sum(p.stat().st_blocks * 512 for p in self.folder.rglob("*") if p.is_file())
        free = shutil.disk_usage(self.folder).free
        if nbytes - held > free:
            raise MachineError(
                f"{self.out.parent}: the result takes {nbytes / 1e9:.2f} GB, but only {free / 1e9:.2f} GB are free"
            )

    def finish(self) -> None:
        """Give the folder its final name."""
        try:
            if self.out.exists() and self.force:
                self.out.rename(self._replaced)
            self.folder.rename(self.out)
        except OSError as error:
            raise _cannot_write(self.out, error) from error
        finally:
            self._unlock()
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


def _cannot_write(path: Path, error: OSError) -> InputError | MachineError:
    message = f"{path}: cannot be written: {error.strerror or error}"
    wrong_place = error.errno in (
        errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ENOTEMPTY, errno.ENOENT,
    )  # fmt: skip
    return InputError(message) if wrong_place else MachineError(message)
