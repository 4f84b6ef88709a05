"""Download whole models and data files from URLs into the cache, for commands that run a model."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ..errors import InputError, MachineError
from ..text import size
from ..urls import redact, register_local_copy, unredact
from .reader import is_plain_name
from .remote import RemoteFile, is_small, last_part, list_files, remote_file_at

#: Bytes of each request.
STEP = 32 << 20


def download_in_place(path: Path) -> None:
    """Replace a placeholder of a remote file by its content, for formats that cannot be read by ranges."""
    if (file := remote_file_at(path)) is not None:
        partial = path.with_name(path.name + ".partial")
        _download(file, partial)
        partial.replace(path)


def download_model(url: str) -> Path:
    """Return a cached folder with all files of the model at a URL."""
    files, _ = list_files(url)
    if "" in files:
        raise InputError(f"{url}: is a file. To run a model, pass the folder with its config.json.")
    wanted = {name: file for name, file in files.items() if name.endswith(".safetensors") or is_small(file)}
    folder = _cached(url, "models", last_part(url).partition("@")[0] or "model", wanted)
    register_local_copy(folder, url)
    return folder


def download_file(url: str) -> Path:
    """Return the cached copy of a data file at a URL."""
    files, _ = list_files(url)
    if "" not in files:
        raise InputError(f"{url}: is a folder. Data at a URL must be one file.")
    name = last_part(url) if is_plain_name(last_part(url)) else "data"
    path = _cached(url, "data", name, {name: files[""]}) / name
    register_local_copy(path, url)
    return path


def _cached(url: str, kind: str, name: str, files: Mapping[str, RemoteFile]) -> Path:
    """Return the cached folder with these versions of the files. Download it if it does not exist."""
    # A new signature does not change a file. Without versions, only the full URL identifies it.
    versioned = all(file.version for file in files.values())
    identity = redact(unredact(url)) if versioned else unredact(url)
    key = json.dumps([identity, sorted((name, file.size, file.version) for name, file in files.items())])
    home = cache_folder() / kind / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = home / name
    if folder.is_dir():
        return folder
    total = sum(file.size for file in files.values())
    logging.getLogger(__name__).warning("%s: downloading %s to %s", url, size(total), folder)
    try:
        home.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(home).free) < total:
            raise MachineError(f"{home}: {url} takes {size(total)}, but only {size(free)} are free")
        with tempfile.TemporaryDirectory(dir=home, prefix=".partial-") as partial:
            for file_name, file in files.items():
                _download(file, Path(partial) / name / file_name)
            (Path(partial) / name).rename(folder)
    except OSError as error:
        if not folder.is_dir():  # otherwise another process has downloaded it meanwhile
            raise MachineError(f"{home}: cannot be written: {error.strerror}") from error
    return folder


def _download(file: RemoteFile, path: Path) -> None:
    """Download a whole file, several ranges at a time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as out, ThreadPoolExecutor(8, "gradmerge-download") as pool:

        def fetch(start: int) -> None:
            os.pwrite(out.fileno(), file.fetch(start, min(start + STEP, file.size)), start)

        list(pool.map(fetch, range(0, file.size, STEP)))


def cache_folder() -> Path:
    """Return the folder for downloads and for results on their way to a URL: GRADMERGE_CACHE or a default."""
    if folder := os.environ.get("GRADMERGE_CACHE"):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gradmerge"  # noqa: PTH111
