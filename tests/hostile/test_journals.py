"""Journals that have changed since they were written: the merge ends with the right bytes all the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import gradmerge as gm
from tests.fuzz.curvature import Unfinished
from tests.making import weight_bytes


def line(number: int, change: Callable[[Any], Any]) -> Callable[[list[bytes]], None]:
    """Another record in a line, with the checksum that was there, or with none as older versions wrote it."""

    def spoil(lines: list[bytes]) -> None:
        text, _, checksum = lines[number].rpartition(b" ")
        lines[number] = json.dumps(change(json.loads(text))).encode() + b" " + checksum
        lines.append(json.dumps(change(json.loads(text))).encode())

    return spoil


def header(text: bytes) -> Callable[[list[bytes]], None]:
    return lambda lines: lines.__setitem__(0, text)


SPOILED: dict[str, Callable[[list[bytes]], None]] = {
    "a block that was not finished": line(3, lambda unit: 9),
    "a block that there is not": line(3, lambda unit: 10**30),
    "a number that is none": line(3, lambda unit: [unit]),
    "a block that is text": line(3, lambda unit: "x"),
    "no block at all": line(3, lambda unit: []),
    "other thresholds": line(1, lambda found: {"statistics": {"thresholds": {"": [0, 0]}, "measured": {}}}),
    "thresholds that are none": line(1, lambda found: {"statistics": 5}),
    "no thresholds": line(1, lambda found: {"statistics": {}}),
    "measures that are none": line(1, lambda found: {"statistics": {"thresholds": {}, "measured": [1]}}),
    "a guess that is none": line(1, lambda found: {"guess": []}),
    "deep nesting": lambda lines: lines.append(b"[" * 100_000),
    "a deep header": header(b"[" * 100_000),
    "a header that is a number": header(b"5"),
}


@pytest.fixture(scope="module")
def unfinished(tmp_path_factory: pytest.TempPathFactory) -> Unfinished:
    return Unfinished(tmp_path_factory.mktemp("unfinished") / "merge")


@pytest.mark.parametrize("case", SPOILED)
def test_a_journal_that_has_changed_is_not_believed(
    unfinished: Unfinished, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = unfinished.place
    monkeypatch.chdir(place.inputs)
    lines = unfinished.left[unfinished.journal].splitlines()
    assert len(lines) > 5, "the merge was stopped before it had finished a block"
    SPOILED[case](lines)
    place.prepare(unfinished.left | {unfinished.journal: b"\n".join(lines) + b"\n"})
    gm.merge(unfinished.given, place.out, threads=1, block=8, resume=True)
    assert weight_bytes(place.out) == unfinished.whole
    record = json.loads((place.out / "gradmerge.json").read_text())
    assert record["resumed_blocks"] == 0
    place.restore()


def test_a_journal_as_it_was_written_is_gone_on_with(unfinished: Unfinished, monkeypatch: pytest.MonkeyPatch) -> None:
    place = unfinished.place
    monkeypatch.chdir(place.inputs)
    place.prepare(unfinished.left)
    gm.merge(unfinished.given, place.out, threads=1, block=8, resume=True)
    assert json.loads((place.out / "gradmerge.json").read_text())["resumed_blocks"] > 3
    assert weight_bytes(place.out) == unfinished.whole
    place.restore()


@pytest.mark.parametrize("text", ["[" * 100_000, '{"fingerprint": ' + "9" * 5000 + "}", "[]", "5", "", "\udcff"])
def test_a_record_that_cannot_be_read_is_not_taken_for_that_of_this_merge(
    unfinished: Unfinished, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = unfinished.place
    monkeypatch.chdir(place.inputs)
    content = text.encode("utf-8", "surrogateescape")
    place.prepare({Path("out/gradmerge.json"): content})
    with pytest.raises(gm.InputError, match="exists already"):
        gm.merge(unfinished.given, place.out, threads=1, resume=True)
    assert (place.out / "gradmerge.json").read_bytes() == content
    place.restore()
