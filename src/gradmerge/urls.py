"""URLs of models, data and results, and how to show them without passwords and signatures.

:func:`as_url` redacts every URL on input. Records, cards, journals and messages therefore contain no secrets. Only the
file system gets the original, from :func:`unredact`.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{1,3})(.*)", re.DOTALL)
#: `user:password@` before the host, where S3 keys may contain a slash. `@revision` in hf://org/name@revision is none.
_USER = re.compile(r"(?<![\w+.-])((?!hf:)[A-Za-z][A-Za-z0-9+.-]+:/{1,2})([^/\s@:'\"?]+:[^\s@'\"?]+|[^/\s@'\"?]+)@")
_QUERY = re.compile(r"(?<![\w+.-])([A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^\s'\"?]*\?)([^\s'\"]+)")
#: Query parameters that select a version of a file. All others may be signatures.
_PUBLIC_PARAMETERS = {"versionid", "version_id", "generation", "download", "revision", "ref"}
REDACTED = "***"
_originals: dict[str, str] = {}
"""Redacted URLs and their prefixes up to the host → the originals."""
_secrets: dict[str, str] = {}
"""`user:password@` → what to show instead, for errors of file systems that quote it without the protocol."""
_local_copies: dict[str, str] = {}
"""Path of a local copy → URL."""


def is_url(reference: object) -> bool:
    """Return whether a reference is a URL, such as s3://bucket/model or file:///model."""
    return isinstance(reference, str | Path) and as_url(reference) is not None


def as_url(reference: str | Path) -> str | None:
    """Return a reference as a redacted URL, or None if it is a local path.

    A :class:`Path` has lost one slash of `s3://`; this restores it. A folder that is really named `s3:` is a path.
    """
    match = _URL.fullmatch(str(reference))
    if match is None or (match[2] != "//" and match[1] != "file" and os.path.lexists(f"{match[1]}:")):
        return None
    protocol = match[1].lower()
    absolute = protocol in ("file", "local") or (protocol == "hdfs" and match[2] == "///")
    rest = "/" + match[3].lstrip("/") if absolute else match[3]
    url = f"{protocol}://{rest if '?' in rest else rest.rstrip('/')}"
    redacted = redact(url)
    if redacted == url:
        return url
    # Two URLs that differ only in redacted query parameters may be two files: number them.
    before, _, after = redacted.rpartition(REDACTED)
    number = 1
    while "?" in before and _originals.get(redacted, url) != url:
        number += 1
        redacted = f"{before}{REDACTED}{number}{after}"
    _originals[redacted] = url
    if (user := _USER.match(redacted)) and (original := _USER.match(url)):
        _originals[user[0]] = original[0]
        _secrets[f"{original[2]}@"] = f"{REDACTED}@"
    return redacted


def remote_url(reference: str | Path) -> str | None:
    """Return a reference as a redacted URL, or None if it is a local path or a `file://` URL."""
    url = as_url(reference)
    return None if url is None or url.startswith("file://") else url


def strip_file_scheme(reference: str | Path) -> str:
    """Return the path of a `file://` URL, and any other reference unchanged."""
    url = as_url(reference)
    if url is None or not url.startswith("file://"):
        return str(reference)
    return unquote(url.removeprefix("file://")) or "/"


def unredact(url: str) -> str:
    """Return the original of a URL that :func:`as_url` has redacted."""
    if url in _originals:
        return _originals[url]
    user = _USER.match(url)
    return _originals.get(user[0], user[0]) + url[user.end() :] if user else url


def redact(text: str) -> str:
    """Remove passwords and signatures of URLs from a text, and replace paths of local copies by their URLs."""
    for path, url in _local_copies.items():
        text = text.replace(path, url)
    for secret, replacement in _secrets.items():
        text = text.replace(secret, replacement)
    if ":/" not in text:
        return text
    text = _USER.sub(rf"\g<1>{REDACTED}@", text)
    return _QUERY.sub(lambda match: match[1] + "&".join(map(_redact_parameter, match[2].split("&"))), text)


def _redact_parameter(text: str) -> str:
    key, equals, value = text.partition("=")
    if key.lower() in _PUBLIC_PARAMETERS or text.startswith(REDACTED) or value.startswith(REDACTED):
        return text
    return f"{key}={REDACTED}" if equals else REDACTED


def redact_urls(value: Any) -> Any:
    """Return a value such as a recipe with every URL in it redacted."""
    if isinstance(value, str):
        return as_url(value) or value
    if isinstance(value, dict):
        return {key: redact_urls(item) for key, item in value.items()}
    return [redact_urls(item) for item in value] if isinstance(value, list) else value


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
