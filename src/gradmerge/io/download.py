"""Whole files and models from a URL, for what cannot be read by ranges: models that are run, data, and pickles."""

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
from .remote import RemoteFile, files_at, is_small, last_part, listing, remote_file_at

#: Bytes of a range.
STEP = 32 << 20


def download_in_place(path: Path) -> None:
    """Fetch all of the file that a path stands for, if it does: for what cannot be read by ranges."""
    if (file := remote_file_at(path)) is not None:
        partial = path.with_name(path.name + ".partial")
        download({file: partial})
        partial.replace(path)


def download_model(url: str) -> Path:
    """The folder of a model at a URL, all of it on this machine: for those who run it. It stays in the cache."""
    place, files = files_at(url)
    if "" in files:
        raise InputError(f"{url}: a file is not enough to run a model; give the folder with its config.json")
    wanted = {n: f for n, f in files.items() if n.endswith(".safetensors") or is_small(f)}
    folder = _kept(url, "models", place.name, wanted, "is run, and fetched for that")
    register_local_copy(folder, url)
    return folder


def download_file(url: str) -> Path:
    """A file of data at a URL, on this machine. It stays in the cache."""
    files, _ = listing(url)
    if "" not in files:
        raise InputError(f"{url}: is a folder; data at a URL are one file")
    name = last_part(url) if is_plain_name(last_part(url)) else "data"
    path = _kept(url, "data", name, {name: files[""]}, "is read, and fetched for that") / name
    register_local_copy(path, url)
    return path


def _kept(url: str, kind: str, name: str, wanted: Mapping[str, RemoteFile], why: str) -> Path:
    """The folder in the cache with these files as they are now, fetched if it is not there yet."""
    # Signatures change, and a file stays the same; but where no version tells, other URLs are other files.
    known = all(file.version for file in wanted.values())
    place = redact(unredact(url)) if known else unredact(url)
    key = json.dumps([place, sorted((name, file.size, file.version) for name, file in wanted.items())])
    home = cache_folder() / kind / hashlib.sha256(key.encode()).hexdigest()[:16]
    folder = home / name
    if not folder.is_dir():
        total = sum(file.size for file in wanted.values())
        logging.getLogger(__name__).warning("%s: %s: %s to %s", url, why, size(total), folder)
        try:
            home.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(home).free) < total:
                raise MachineError(f"{home}: {url} takes {size(total)}, but only {size(free)} are free")
            with tempfile.TemporaryDirectory(dir=home, prefix=".partial-") as partial:
                places = {file: Path(partial) / name / own for own, file in wanted.items()}
                for one in places.values():
                    one.parent.mkdir(parents=True, exist_ok=True)
                download(places)
                (Path(partial) / name).rename(folder)
        except OSError as error:
            if not folder.is_dir():  # else another process has fetched it meanwhile
                raise MachineError(f"{home}: cannot be written: {error.strerror}") from error
    return folder


def download(places: Mapping[RemoteFile, Path]) -> None:
    """Fetch whole files, several ranges at a time."""

    def fetch(part: tuple[RemoteFile, Path, int]) -> None:
        file, place, start = part
        with place.open("r+b") as out:
            out.seek(start)
            out.write(file.fetch(start, min(start + STEP, file.size)))

    for file, place in places.items():
        with place.open("wb") as out:
            out.truncate(file.size)
    parts = [(file, place, start) for file, place in places.items() for start in range(0, file.size, STEP)]
    with ThreadPoolExecutor(8, "gradmerge-fetch") as pool:
        for done in [pool.submit(fetch, part) for part in parts]:
            try:
                done.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def cache_folder() -> Path:
    """Where what is fetched for good, and what waits to be sent, lies: GRADMERGE_CACHE, or a folder in the user's."""
    given = os.environ.get("GRADMERGE_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gradmerge"  # noqa: PTH111
    return Path(given).absolute() if given else usual
