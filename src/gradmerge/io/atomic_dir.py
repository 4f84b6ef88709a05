"""Write a folder, or a file, that appears under its name only when it is complete.

The folder is written beside its destination and then renamed. A result at a URL is written in the cache and uploaded
(`io/upload.py`). Every command that writes a folder uses this module and names its inputs. It never replaces or empties
an input, or a folder that gradmerge did not write.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import GradmergeError, InputError, MachineError
from ..text import size
from ..urls import UrlPath, is_url, output_path

if TYPE_CHECKING:
    from .upload import Upload

#: Suffixes of the unfinished folder, and of a folder that is being replaced.
PARTIAL, REPLACED = ".gradmerge-partial", ".gradmerge-replaced"
#: A file in every unfinished folder that says which command writes it. A folder at a URL has it, too.
MARK = ".gradmerge"
#: A folder with one of these sets of files was written by gradmerge, and so was one with only curvature files.
RESULT_FILES = (
    {MARK},
    {"gradmerge.json"},
    {"report.html", "diagnosis.json"},
    {"report.html", "preview.json"},
    {"commands.sh", "results.json"},
)
CURVATURE_FILES = ("curvature*.safetensors", "curvature.safetensors.index.json")


class AtomicDir:
    """The folder ``OUT.gradmerge-partial``, renamed to ``OUT`` when the ``with`` block ends without an error.

    An error removes the folder, unless ``keep`` is set. Only one process at a time may write to OUT.

    Args:
        out: The destination: a path or a URL.
        kind: What is written, in a few words. A folder that another kind of command left is not touched.
        force: Replace OUT if gradmerge wrote it.
        resume: Keep the files that an earlier, killed process left. A result at a URL starts again.
        reads: All inputs. OUT must not overlap any of them.
        inside: Inputs that OUT may lie in.
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
        self.out = output_path(out)
        self.kind, self.force = kind, force
        self.upload: Upload | None = None
        """Sends the files if OUT is a URL."""
        self.keep = False
        """Whether an error leaves the folder, for a later run with ``resume``."""
        self.temporary = False
        """Whether the folder is removed at the end, and never renamed."""
        reads, self._lock = list(reads), -1
        if isinstance(self.out, UrlPath):
            from .upload import Upload

            self.upload = Upload(self.out)
            self.upload.check(reads, inside, force, resume)
            self._target, resume = self.upload.folder, False
        else:
            self._target = self.out = Path(os.path.abspath(self.out))
        if not self._target.name:
            raise InputError(f"{out}: is not a folder name. Pass the name of a new folder.")
        self.folder, self._replaced = (self._target.with_name(self._target.name + end) for end in (PARTIAL, REPLACED))
        try:
            for folder in (self.folder, self._replaced):
                if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
                    raise InputError(f"{folder}: is a link or a file, but gradmerge needs this name. Move it away.")
                _check_loses_nothing(folder, reads)
            check_output_path(self._target, reads, inside)
            self._check_replaceable()
            self._lock_folder()
            self._check_mark()  # only the process that holds the lock may look at what another one left
            self._put_back()
            self._check_replaceable()
            if not resume:
                self.clear()
        except BaseException as error:
            if self._lock >= 0:
                if {path.name for path in self.folder.iterdir()} <= {MARK}:
                    shutil.rmtree(self.folder, ignore_errors=True)
                self.close()
            if isinstance(error, OSError):
                raise _cannot_write(self.folder, error) from error
            raise

    def __enter__(self) -> AtomicDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None and not self.temporary:
                self._finish()
            elif kind is None or self.upload is not None or not self.keep:
                shutil.rmtree(self.folder, ignore_errors=True)
                if self.upload is not None:
                    with contextlib.suppress(GradmergeError):
                        self.upload.discard()
        finally:
            self.close()

    def clear(self) -> None:
        """Remove the files that an earlier process left."""
        try:
            for child in self.folder.iterdir():
                if child.name != MARK:
                    shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
        except OSError as error:
            raise _cannot_write(self.folder, error) from error

    def close(self) -> None:
        """Release the lock, and leave the folder as it is."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _check_replaceable(self) -> None:
        if not self._target.exists() and not self._target.is_symlink():
            return
        if not self.force:
            raise InputError(f"{self.out}: exists already. Choose another output, or pass force=True to replace it.")
        if not self._target.is_dir() or self._target.is_symlink():
            raise InputError(f"{self.out}: is not a folder. force=True replaces only folders.")
        _check_ours(self._target)

    def _lock_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except OSError as error:  # other errors: the file system does not support locks
            locked = error.errno not in (errno.EWOULDBLOCK, errno.EACCES)
        if not locked or not self.folder.exists() or not os.path.samestat(os.fstat(self._lock), self.folder.lstat()):
            self.close()
            raise InputError(f"{self.folder}: another process is writing to it. Wait, or choose another output.")

    def _check_mark(self) -> None:
        """Raise if the unfinished folder is not ours, or if another kind of command left it. Write the mark."""
        mark = self.folder / MARK
        if mark.is_file():
            kind = mark.read_text("utf-8", errors="replace")
            if not self.kind.startswith(kind):  # a process may have been killed while it wrote the mark
                raise InputError(
                    f"{self.folder}: contains an unfinished {kind}, and this is a {self.kind}. Finish that first, "
                    "choose another output, or remove the folder to give it up."
                )
        elif not is_ours(self.folder):  # a process killed just before the rename leaves a result without the mark
            raise InputError(f"{self.folder}: was not written by gradmerge, which needs this name. Move it away.")
        mark.write_text(self.kind, "utf-8")

    def _put_back(self) -> None:
        """Restore a folder that a process moved away before it was killed."""
        if self._replaced.exists():
            if not self._target.exists():
                self._replaced.rename(self._target)
            elif self.force:  # killed after the new folder had its name
                _check_ours(self._replaced)
                shutil.rmtree(self._replaced, ignore_errors=True)

    def _finish(self) -> None:
        if self.upload is not None:
            self.upload.finish(self.folder)
            shutil.rmtree(self.folder, ignore_errors=True)
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
                f"{self.out}: cannot get this name: {error.strerror}. The complete result is in {self.folder}."
            ) from error
        if replaces:
            shutil.rmtree(self._replaced, ignore_errors=True)


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a path to write to. When the ``with`` block ends, the file replaces ``path``."""
    if is_url(path):
        raise InputError(f"{path}: can only be written to this machine; give a local file, and copy it")
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        yield partial
        partial.replace(path)
    except OSError as error:
        raise MachineError(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)


def require_space(folder: Path, nbytes: int) -> None:
    """Raise if the disk cannot hold ``nbytes``, of which a folder holds a part already."""
    held = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    free = shutil.disk_usage(folder).free
    if nbytes - held > free:
        raise MachineError(f"{folder.parent}: the result takes {size(nbytes)}, but only {size(free)} are free")


def check_output_path(out: Path, reads: Iterable[Path], inside: Iterable[Path] = ()) -> None:
    """Raise if OUT contains an input, or lies in an input that is not in ``inside``."""
    reads, allowed = list(reads), {path.resolve() for path in inside}
    _check_loses_nothing(out, reads)
    for path in reads:
        if path.is_dir() and path.resolve() not in allowed and _contains(path, out):
            raise InputError(f"{out}: lies in the input {path}. Choose another output.")


def _check_loses_nothing(folder: Path, reads: Iterable[Path]) -> None:
    """Raise if a folder is or contains an input, the working directory or the home directory."""
    home = Path(os.path.expanduser("~"))  # noqa: PTH111 - Path.home() may raise
    for path in (*reads, Path.cwd(), home) if folder.exists() else ():
        if _contains(folder, path):
            raise InputError(f"{folder}: contains {path}, which would be lost. Choose another output.")


def _contains(folder: Path, path: Path) -> bool:
    """Return whether a path is or lies in a folder, before or after following links."""
    folders, paths = ({Path(os.path.abspath(either)), either.resolve()} for either in (folder, path))
    return any(path.is_relative_to(folder) for folder in folders for path in paths)


def _check_ours(folder: Path) -> None:
    if not is_ours(folder):
        raise InputError(
            f"{folder}: was not written by gradmerge, so force=True does not replace it. Choose another output, or "
            "remove the folder yourself."
        )


def is_ours(folder: Path) -> bool:
    """Return whether gradmerge wrote a folder, or the folder is empty."""
    return are_ours({path.name for path in folder.iterdir()})


def are_ours(names: set[str]) -> bool:
    """Return whether gradmerge wrote a result with these files. An empty folder counts as one."""
    curvature = {name for name in names if any(fnmatchcase(name, pattern) for pattern in CURVATURE_FILES)}
    only_curvature = bool(curvature) and names <= {*curvature, "README.md"}
    return not names or only_curvature or any(marks <= names for marks in RESULT_FILES)


def _cannot_write(path: Path, error: OSError) -> InputError | MachineError:
    """Return a MachineError if the disk is full or fails, and an InputError if another output would help."""
    kind = MachineError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else InputError
    return kind(f"{path}: cannot be written: {error.strerror or error}")
