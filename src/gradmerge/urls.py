"""URLs of models, data and results.

The program passes complete URLs on. Whatever it prints or writes goes through :func:`redact` first.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import unquote

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{1,3})(.*)", re.DOTALL)
#: `user:password@` before the host, where S3 keys may contain a slash. `@revision` in hf://org/name@revision is none.
_USER = re.compile(r"(?<![\w+.-])((?!hf:)[A-Za-z][A-Za-z0-9+.-]+:/{1,2})(?:[^/\s@:'\"?]+:[^\s@'\"?]+|[^/\s@'\"?]+)@")
#: A query string, without punctuation of the sentence after it.
_QUERY = re.compile(r"(?<![\w+.-])([A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^\s'\"?]*)\?[^\s'\"]*[^\s'\".:,;)]")
_local_copies: dict[str, str] = {}
"""Path of a local copy → URL."""


def is_url(reference: object) -> bool:
    """Return whether a reference is a URL, such as s3://bucket/model or file:///model."""
    return isinstance(reference, str | Path) and as_url(reference) is not None


def as_url(reference: str | Path) -> str | None:
    """Return a reference as a URL, or None if it is a local path.

    A :class:`Path` has lost one slash of `s3://`; this restores it. A folder that is really named `s3:` is a path.
    """
    match = _URL.fullmatch(str(reference))
    if match is None or (match[2] != "//" and match[1] != "file" and os.path.lexists(f"{match[1]}:")):
        return None
    protocol = match[1].lower()
    absolute = protocol in ("file", "local") or (protocol == "hdfs" and match[2] == "///")
    rest = "/" + match[3].lstrip("/") if absolute else match[3]
    return f"{protocol}://{rest if '?' in rest else rest.rstrip('/')}"


def remote_url(reference: str | Path) -> str | None:
    """Return a reference as a URL, or None if it is a local path or a `file://` URL."""
    url = as_url(reference)
    return None if url is None or url.startswith("file://") else url


def strip_file_scheme(reference: str | Path) -> str:
    """Return the path of a `file://` URL, and any other reference unchanged."""
    url = as_url(reference)
    if url is None or not url.startswith("file://"):
        return str(reference)
    return unquote(url.removeprefix("file://")) or "/"


def redact(text: str) -> str:
    """Remove users, passwords and query strings from URLs in a text, and replace paths of local copies by URLs."""
    for path, url in _local_copies.items():
        text = text.replace(path, _without_secrets(url))
    return _without_secrets(text) if ":/" in text else text


def _without_secrets(text: str) -> str:
    return _QUERY.sub(r"\1", _USER.sub(r"\1", text))


def register_local_copy(path: Path, url: str) -> None:
    """Have messages name the URL instead of the path of its local copy."""
    _local_copies[str(path)] = url


def count_local_copies() -> int:
    """Return how many URLs have a local copy in this process."""
    return len(_local_copies)


def url_of(path: Path) -> str | None:
    """Return the URL that a path is, or that it is a local copy of; None for other paths."""
    for parent in (path, *path.parents) if _local_copies else ():
        if str(parent) in _local_copies:
            return f"{_local_copies[str(parent)]}/{path.relative_to(parent).as_posix()}".removesuffix("/.")
    return as_url(path)


class UrlPath(type(Path())):  # type: ignore[misc]
    """A URL where a path is expected. It has a name and a parent, and its text is the URL."""

    def __str__(self) -> str:
        return as_url(super().__str__()) or super().__str__()


def output_path(out: str | Path) -> Path:
    """Return the destination of a result: a local path or a :class:`UrlPath`."""
    url = remote_url(out)
    return Path(strip_file_scheme(out)) if url is None else UrlPath(url)
