"""URLs are shown without their secrets."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.errors import InputError
from gradmerge.io.reader import local_path
from gradmerge.urls import UrlPath, as_url, is_url, output_path, redact, redact_urls, strip_file_scheme, unredact

REDACTED = {
    "s3://bucket/model/": "s3://bucket/model",
    "s3://KEY:se/cret+x@bucket/m": "s3://***@bucket/m",
    "https://me:word@host/m.safetensors": "https://***@host/m.safetensors",
    "https://token@host/m": "https://***@host/m",
    "https://host/m?X-Amz-Signature=abc&versionId=3": "https://host/m?X-Amz-Signature=***&versionId=3",
    "https://host/m?opaque": "https://host/m?***",
    "hf://org/name@main/model.safetensors": "hf://org/name@main/model.safetensors",
    "HTTPS://Host/M": "https://Host/M",
    "local:///m": "local:///m",
}


@pytest.mark.parametrize("url", REDACTED)
def test_a_url_is_shown_without_its_secrets(url: str) -> None:
    shown = as_url(url)
    assert shown == REDACTED[url] == as_url(shown) == redact(shown)
    assert unredact(shown).lower() == url.rstrip("/").lower()
    assert redact(f"x: {url!r} failed").lower() == f"x: {shown!r} failed".lower() or url.endswith("/")
    assert as_url(Path(url)) == str(UrlPath(url)) == str(output_path(url)) == shown
    assert redact_urls({"models": [{"model": url, "weight": 1}]}) == {"models": [{"model": shown, "weight": 1}]}


def test_a_path_below_a_url_has_the_secrets_of_the_url() -> None:
    folder = UrlPath("https://me:word@host/recipes/r.yml").parent
    assert str(folder) == "https://***@host/recipes"
    assert unredact(f"{folder}/x") == "https://me:word@host/recipes/x"


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
    shown = as_url("s3://KEY:se/cret@bucket/m?sig=abc")
    assert redact(f"{shown}: not there (KEY:se/cret@bucket/m)") == "s3://***@bucket/m?sig=***: not there (***@bucket/m)"
    error = InputError("https://a:b@h/x: cannot be read (GET https://h/x?sig=secret, 403)")
    assert "a:b" not in str(error) and "secret" not in str(error)


@pytest.mark.parametrize("end", ["?token=%s&versionId=3", "?%s"])
def test_urls_with_different_secret_parameters_stay_different(end: str) -> None:
    urls = [f"https://host/two.csv{end % secret}" for secret in ("abc", "def", "ghi")]
    for _ in range(2):
        shown = [str(as_url(url)) for url in urls]
        assert shown == [f"https://host/two.csv{end % text}" for text in ("***", "***2", "***3")]
        assert [unredact(text) for text in shown] == urls and [redact(text) for text in shown] == shown


def test_the_last_password_of_a_host_is_used() -> None:
    shown = {as_url(f"https://me:{word}@host/two.csv") for word in ("old", "new")}
    assert len(shown) == 1 and unredact(str(as_url("https://***@host/two.csv"))).startswith("https://me:")
