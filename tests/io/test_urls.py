"""What a URL is, and that its secrets are never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradmerge.errors import InputError
from gradmerge.io.reader import local_path
from gradmerge.urls import UrlPath, as_url, is_url, output_path, redact, redact_urls, strip_file_scheme, unredact

SHOWN = {
    "s3://bucket/model/": "s3://bucket/model",
    "s3://KEY:se/cret+x@bucket/m": "s3://***@bucket/m",
    "https://me:word@host/m.safetensors": "https://***@host/m.safetensors",
    "https://token@host/m": "https://***@host/m",
    "https://host/m?X-Amz-Signature=abc&versionId=3": "https://host/m?X-Amz-Signature=***&versionId=3",
    "https://host/m?opaque": "https://host/m?***",
    "hf://org/name@main/model.safetensors": "hf://org/name@main/model.safetensors",
}


@pytest.mark.parametrize("url", SHOWN)
def test_a_url_is_shown_without_its_secrets_and_known_with_them(url: str) -> None:
    shown = as_url(url)
    assert shown == SHOWN[url] == as_url(shown) == redact(shown)
    assert unredact(shown) == url.rstrip("/")
    assert redact(f"x: {url!r}, {url} failed") == f"x: {shown!r}, {shown} failed" or url.endswith("/")
    assert as_url(Path(url)) == shown and str(UrlPath(url)) == shown and str(output_path(url)) == shown
    assert redact_urls({"models": [{"model": url, "weight": 1}]}) == {"models": [{"model": shown, "weight": 1}]}


def test_urls_are_written_in_one_way() -> None:
    assert as_url("HTTPS://Host/M") == "https://Host/M"
    assert as_url("hdfs:///user/m") == "hdfs:///user/m" and as_url(Path("hdfs://host/m")) == "hdfs://host/m"
    assert as_url(Path("local:///m")) == as_url("local:///m") == "local:///m"


def test_what_lies_below_a_url_has_its_secrets() -> None:
    folder = UrlPath("https://me:word@host/recipes/r.yml").parent
    assert str(folder) == "https://***@host/recipes"
    assert unredact(f"{folder}/x") == "https://me:word@host/recipes/x"


@pytest.mark.parametrize("text", ["org/name", "./model", "/a/b", "model:test", "data.npz:test", "C:/x", "a=b", ""])
def test_a_path_is_no_url(text: str) -> None:
    assert not is_url(text) and strip_file_scheme(text) == text


def test_a_file_url_is_a_path_and_a_folder_with_a_colon_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a b").mkdir()
    assert local_path(f"file://{tmp_path}/a%20b", None) == tmp_path / "a b" == output_path(f"file://{tmp_path}/a%20b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s3:").mkdir()
    assert as_url(Path("s3:/x")) is None and as_url("s3://x") == "s3://x"


def test_errors_hide_what_they_quote() -> None:
    shown = as_url("s3://KEY:se/cret@bucket/m?sig=abc")
    assert redact(f"{shown}: not there (KEY:se/cret@bucket/m)") == "s3://***@bucket/m?sig=***: not there (***@bucket/m)"
    error = InputError("https://a:b@h/x: cannot be read (GET https://h/x?sig=secret, 403)")
    assert str(error) == "https://***@h/x: cannot be read (GET https://h/x?sig=*** 403)"


def test_urls_that_differ_in_what_is_hidden_of_their_queries_are_two() -> None:
    for end in ("?token=%s&versionId=3", "?%s"):
        urls = [f"https://host/two.csv{end % secret}" for secret in ("abc", "def", "ghi")]
        for _ in range(2):
            shown = [as_url(url) for url in urls]
            assert shown == [f"https://host/two.csv{end % text}" for text in ("***", "***2", "***3")]
            assert [unredact(text) for text in shown if text] == urls
            assert [as_url(text) for text in shown if text] == shown == [redact(text) for text in shown if text]
    later = [as_url(f"https://me:{word}@host/two.csv") for word in ("old", "new")]
    assert later[0] == later[1] and unredact(str(later[0])) == "https://me:new@host/two.csv"
