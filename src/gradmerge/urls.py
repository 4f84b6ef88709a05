"""What a URL is, and how one is shown: without the passwords and signatures that it may carry.

Wherever a reference comes in, it is replaced by its form without secrets at once. Records, cards, journals and messages
can then hold none; :func:`unredact` gives back what the user wrote, to the file system alone.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(/{1,3})(.*)", re.DOTALL)
#: `user:password@` before the host, where keys of S3 may hold a slash; @revision in hf://org/name@revision is none.
_USER = re.compile(r"(?<![\w+.-])((?!hf:)[A-Za-z][A-Za-z0-9+.-]+:/{1,2})([^/\s@:'\"?]+:[^\s@'\"?]+|[^/\s@'\"?]+)@")
_QUERY = re.compile(r"(?<![\w+.-])([A-Za-z][A-Za-z0-9+.-]+:/{1,2}[^\s'\"?]*\?)([^\s'\"]+)")
#: Parameters of a query that say which version of a file is meant. All others may be signatures.
_PLAIN = {"versionid", "version_id", "generation", "download", "revision", "ref"}
REDACTED = "***"
#: URLs as they are shown → as they were given; their secrets → what is shown; local copies of small files → URL.
_given: dict[str, str] = {}
_secrets: dict[str, str] = {}
_copies: dict[str, str] = {}


def is_url(text: object) -> bool:
    """Whether a reference is a URL such as s3://bucket/model; `file://` is one, and names a place on this machine."""
    return isinstance(text, str | Path) and as_url(text) is not None


def as_url(place: str | Path) -> str | None:
    """The URL that a text or path is, without secrets; None for a path on this machine.

    A path has lost one of the slashes of `s3://`, and gets it back. A folder that is really called `s3:` is a folder.
    """
    found = _URL.fullmatch(str(place))
    if found is None or (found[2] != "//" and found[1] != "file" and os.path.lexists(f"{found[1]}:")):
        return None
    protocol = found[1].lower()
    from_root = protocol in ("file", "local") or (protocol == "hdfs" and found[2] == "///")
    rest = "/" + found[3].lstrip("/") if from_root else found[3]
    url = f"{protocol}://{rest if '?' in rest else rest.rstrip('/')}"
    shown = redact(url)
    if shown != url:
        shown = _of_its_own(shown, url)
        _given[shown] = url
        if (user := _USER.match(shown)) and (real := _USER.match(url)):
            _given[user[0]] = real[0]
            _secrets[f"{real[2]}@"] = f"{REDACTED}@"  # errors of file systems quote it without the protocol
    return shown


def _of_its_own(shown: str, url: str) -> str:
    """A form that stands for no other URL: two that differ in what is hidden of a query may be two files."""
    before, _, after = shown.rpartition(REDACTED)
    number = 1
    while "?" in before and _given.get(shown, url) != url:
        number += 1
        shown = f"{before}{REDACTED}{number}{after}"
    return shown


def remote_url(place: str | Path) -> str | None:
    """The URL of what lies elsewhere; None for a path on this machine, which `file://` is too."""
    url = as_url(place)
    return None if url is None or url.startswith("file://") else url


def strip_file_scheme(place: str | Path) -> str:
    """A reference as a path, if it is a `file://` URL; any other as it is."""
    url = as_url(place)
    return unquote(url.removeprefix("file://")) or "/" if url is not None and url.startswith("file://") else str(place)


def unredact(url: str) -> str:
    """A URL with what :func:`as_url` has hidden of it."""
    if url in _given:
        return _given[url]
    user = _USER.match(url)
    return _given.get(user[0], user[0]) + url[user.end() :] if user else url


def redact(text: str) -> str:
    """Text as it may be shown: without secrets of URLs, and with URLs in place of the copies of their files."""
    for copy, url in _copies.items():
        text = text.replace(copy, url)
    for secret, shown in _secrets.items():
        text = text.replace(secret, shown)
    if ":/" not in text:
        return text
    text = _USER.sub(rf"\g<1>{REDACTED}@", text)
    return _QUERY.sub(lambda found: found[1] + "&".join(map(_parameter, found[2].split("&"))), text)


def _parameter(text: str) -> str:
    key, equals, value = text.partition("=")
    if key.lower() in _PLAIN or text.startswith(REDACTED) or value.startswith(REDACTED):
        return text
    return f"{key}={REDACTED}" if equals else REDACTED


def redact_urls(value: Any) -> Any:
    """The same value, with every URL in it as it is shown."""
    if isinstance(value, str):
        return as_url(value) or value
    if isinstance(value, dict):
        return {key: redact_urls(item) for key, item in value.items()}
    return [redact_urls(item) for item in value] if isinstance(value, list) else value


def count_local_copies() -> int:
    """How many URLs have a stand-in on this machine."""
    return len(_copies)


def register_local_copy(copy: Path, url: str) -> None:
    """Have messages name a URL where they would name the folder of its copy."""
    _copies[str(copy)] = url


class UrlPath(type(Path())):  # type: ignore[misc]
    """A URL where a path is expected: it has a name and a parent, and is shown as it was written."""

    def __str__(self) -> str:
        return as_url(super().__str__()) or super().__str__()


def output_path(out: str | Path) -> Path:
    """Where a result goes: a path of this machine, or a :class:`UrlPath`."""
    url = remote_url(out)
    return Path(strip_file_scheme(out)) if url is None else UrlPath(url)
