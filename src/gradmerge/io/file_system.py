"""fsspec file systems, with retries and clear errors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ..errors import GradmergeError, InputError, MachineError
from ..text import first_line
from ..urls import redact

#: Number of attempts for each request, and seconds before the second one. The pause doubles every time.
TRIES, PAUSE = 4, 0.25
T = TypeVar("T")


def cache_folder() -> Path:
    """Return the folder for copies of remote files and for results that are being uploaded."""
    if folder := os.environ.get("GRADMERGE_CACHE"):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "gradmerge"  # noqa: PTH111


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL and the path in it."""
    from fsspec.core import url_to_fs  # type: ignore[import-untyped]

    options: dict[str, Any] = {}
    if url.startswith("hf://"):
        from huggingface_hub import constants

        options["endpoint"] = constants.ENDPOINT
    try:
        fs, path = url_to_fs(url, **options)
    except Exception as error:
        raise translate_fs_error(url, error) from None  # its text may contain secrets
    return fs, str(path)


def protocol_of(fs: Any) -> str:
    return fs.protocol if isinstance(fs.protocol, str) else fs.protocol[0]


def retry(url: str, request: Callable[[], T]) -> T:
    """Return what ``request`` returns. Repeat it if the network or the store fails."""
    for attempt in range(TRIES):
        try:
            return request()
        except GradmergeError:
            raise
        except Exception as error:
            translated = translate_fs_error(url, error)
            if isinstance(translated, InputError) or attempt == TRIES - 1:
                raise translated from None
            time.sleep(PAUSE * 2**attempt)
    raise AssertionError


def translate_fs_error(url: str, error: Exception) -> GradmergeError:
    """Return an InputError if the request is wrong, and a MachineError if the network or the store failed."""
    cause = error.__cause__
    if isinstance(cause, Exception) and type(cause).__module__.startswith("aiohttp"):  # fsspec: FileNotFoundError
        return translate_fs_error(url, cause)
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    kind = type(error).__name__
    reason = first_line(error) or kind
    if redact(url) != url:  # the text may quote the password without the protocol before it
        reason = f"status {status}" if status else kind
    if isinstance(error, FileNotFoundError) or status == 404 or kind in ("RepositoryNotFoundError", "NoSuchBucket"):
        return InputError(f"{url}: does not exist, or you may not see it ({reason})")
    if isinstance(error, PermissionError) or status in (401, 403) or "Credentials" in kind or "Token" in kind:
        return InputError(
            f"{url}: access denied ({reason}). Set the credentials of this file system. Records contain no passwords "
            "and signatures: pass such a URL again in full."
        )
    if isinstance(error, ImportError):
        return InputError(f"{url}: a package is not installed ({reason}); try pip install 'gradmerge[remote]'")
    if isinstance(error, ValueError | NotImplementedError) or kind == "ParamValidationError":
        return InputError(f"{url}: cannot be used: {reason}. Check the address, or download the file.")
    return MachineError(f"{url}: the network or the store failed: {kind}: {reason}")
