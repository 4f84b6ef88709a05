"""Words from elsewhere, for people and for machines."""

from __future__ import annotations

import json
import math

import pytest

from gradmerge.text import Measured, listed, natural, one_line, printable, to_json

#: What a terminal, a viewer of text or an encoder would not show as it is.
UNSEEN = "\x00\x07\x08\t\r\x1b\x7f\x80\x9b\u2028\u2029\u202a\u202e\u2066\u2069\udce9\ud800"


@pytest.mark.parametrize("character", UNSEEN)
def test_what_acts_on_a_terminal_is_spelled_out(character: str) -> None:
    shown = printable(f"a{character}b")
    assert shown.isascii() and shown.isprintable() and shown.startswith("a\\") and shown.endswith("b")
    assert shown.encode().decode("unicode_escape") == f"a{character}b"


def test_letters_of_every_script_and_line_feeds_stay() -> None:
    text = "θ̂ = θ_0 + Σ α_t · 日本語 עברית 👩\u200d🔬 \\x1b\nnext"
    assert printable(text) == text
    assert one_line("a\nerror: b\x1b") == "a\\nerror: b\\x1b"


def test_a_name_in_a_list_takes_one_line() -> None:
    assert listed(["a\nerror: b", "c"]) == "  a\\nerror: b\n  c"
    assert len(listed(["\x1b" * 10_000])) <= 302


def test_json_has_no_nan_and_nothing_that_cannot_be_encoded() -> None:
    value = {"α": [math.nan, -math.inf, (1.5, {"x": math.inf})], "name": UNSEEN + '"\n', "n": None, "t": True}
    for indent in (2, None):
        text = to_json(value, indent)
        assert "α" in text and printable(text) == text
        assert text.encode()
        read = json.loads(text, parse_constant=pytest.fail)
        assert read == {"α": [None, None, [1.5, {"x": None}]], "name": UNSEEN + '"\n', "n": None, "t": True}


def test_names_with_thousands_of_digits_can_be_sorted() -> None:
    names = [f"layers.{'9' * 5000}.weight", "layers.10.weight", "layers.2.weight"]
    assert sorted(names, key=natural) == ["layers.2.weight", "layers.10.weight", names[0]]


def test_a_measured_number_is_a_float_that_shows_its_error() -> None:
    value = Measured(0.791666, 0.03707)
    assert f"{value:.4g}" == "0.7917 ± 0.037" and value == 0.791666 and json.dumps(value) == "0.791666"
    assert [f"{Measured(1234.5, error):.5g}" for error in (0.3, 3.21, 123.4, None, math.nan)] == [
        "1234.5 ± 0.30",
        "1234.5 ± 3.2",
        "1234.5 ± 123",
        "1234.5",
        "1234.5",
    ]
