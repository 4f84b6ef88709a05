"""URLs are shown without their secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.errors import InputError
from gradmerge.io.reader import local_path
from gradmerge.io.remote import translate_fs_error
from gradmerge.urls import UrlPath, as_url, is_url, output_path, redact, strip_file_scheme

REDACTED = {
    "s3://bucket/model/": "s3://bucket/model",
    "s3://KEY:se/cret+x@bucket/m": "s3://bucket/m",
    "https://me:word@host/m.safetensors": "https://host/m.safetensors",
    "https://token@host/m": "https://host/m",
    "https://host/m?X-Amz-Signature=abc&versionId=3": "https://host/m",
    "https://host/m?opaque": "https://host/m",
    "hf://org/name@main/model.safetensors": "hf://org/name@main/model.safetensors",
    "HTTPS://Host/M": "https://Host/M",
    "local:///m": "local:///m",
}


@pytest.mark.parametrize("url", REDACTED)
def test_a_url_is_shown_without_its_secrets(url: str) -> None:
    normal = as_url(url)
    assert normal is not None and normal.lower() == url.rstrip("/").lower()
    assert redact(normal) == REDACTED[url] == redact(REDACTED[url])
    assert redact(f"x: {normal!r} failed") == f"x: {REDACTED[url]!r} failed"
    assert as_url(Path(url)) == str(UrlPath(url)) == str(output_path(url)) == normal


def test_a_path_below_a_url_has_the_secrets_of_the_url() -> None:
    folder = UrlPath("https://me:word@host/recipes/r.yml").parent
    assert str(folder / "x") == "https://me:word@host/recipes/x"


@pytest.mark.parametrize("text", ["org/name", "./model", "/a/b", "model:test", "data.npz:test", "C:/x", "a=b", ""])
def test_a_path_is_not_a_url(text: str) -> None:
    assert not is_url(text) and strip_file_scheme(text) == text


def test_a_file_url_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a b").mkdir()
    assert local_path(f"file://{tmp_path}/a%20b", None) == tmp_path / "a b" == output_path(f"file://{tmp_path}/a%20b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert as_url(Path("s3:/x")) is None and as_url("s3://x") == "s3://x"


def test_errors_redact_what_they_quote() -> None:
    error = InputError("https://a:b@h/x: cannot be read (GET https://h/x?sig=secret, 403)")
    assert "a:b" not in str(error) and "secret" not in str(error)
    url = "s3://KEY:se/cret@bucket/m"
    assert "se/cret" not in str(translate_fs_error(url, ValueError("no KEY:se/cret@bucket")))
