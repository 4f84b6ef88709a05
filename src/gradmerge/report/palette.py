"""The colours of reports, on paper and in the dark, and the marks that say the same without colour."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

#: Name → colour on paper and in the dark. Those of series differ in lightness too, and have a contrast of 3:1 or more
#: with `paper`.
_BOTH = {
    "page": ("#f5f6f8", "#0e1216"),
    "paper": ("#ffffff", "#161c22"),
    "ink": ("#1b2530", "#e8edf2"),
    "soft": ("#566270", "#a0adb9"),
    "line": ("#e1e5ea", "#2b353f"),
    "hole": ("#eceff2", "#232c35"),
    "accent": ("#0a5fa5", "#76b9f5"),
    "wash": ("#eaf2fa", "#15273a"),
    "c0": ("#00579c", "#62b0f2"),
    "c1": ("#d9640a", "#f5825a"),
    "c2": ("#07936a", "#2fe0a0"),
    "c3": ("#8f1f6e", "#f65cb6"),
    "c4": ("#5c4500", "#f4e067"),
    "c5": ("#71869a", "#c8ccd0"),
    "c6": ("#0498d1", "#79d4fb"),
    "c7": ("#5202c4", "#a12dd4"),
    "c8": ("#952241", "#ea5e66"),
    "c9": ("#76a02a", "#eefda2"),
}
LIGHT = {name: light for name, (light, _) in _BOTH.items()}
DARK = {name: dark for name, (_, dark) in _BOTH.items()}
#: Every method has its place: ten colours in turn, then the same with other dashes and markers.
_METHODS = (
    "gradient-matching",
    "task-arithmetic",
    "ties",
    "fisher-averaging",
    "weighted-average",
    "dare",
    "average",
    "regmean",
    "removal",
    "slerp",
    "fa1",
    "sparse-finetuning",
    "breadcrumbs",
    "model-stock",
    "nuslerp",
    "passthrough",
    "della",
    "iso-c",
    "sce",
    "tsv",
    "multislerp",
    "karcher",
    "ram",
    "arcee-fusion",
    "nearswap",
    "posterior-sample",
)
_PLACES = {method: place for place, method in enumerate(_METHODS)}
#: Models that are no merge, each with a colour of its own.
_MODELS = {"base": "soft", "tuned": "ink", "its own model": "ink", "target": "c9", "best so far": "c4"}
_COLOURS = 10
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
#: Dark blue to yellow, even in lightness and safe for the colour-blind; the darkest would vanish in the dark.
RISING = ("#46226b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
#: Blue below a centre, orange above it, both safe for the colour-blind.
CENTRED = ("#1c5c99", "#5f9bd0", "#b5d2ea", "#f4f3ef", "#f3c294", "#e0853a", "#a8480a")


def _method(name: str) -> str:
    """The method that a series is of: `ties` of `ties 0.5`, and of `ties, density 0.2`."""
    return re.split("[ ,]", name, maxsplit=1)[0]


def place_of(name: str) -> int:
    """The place of a method, also of one that a user has added: the same on every page."""
    known = _PLACES.get(_method(name))
    return zlib.crc32(name.encode("utf-8", "replace")) % 1000 if known is None else known


def is_known(name: str) -> bool:
    """Whether a series is one of ours: a method, or a model that is no merge."""
    return name in _MODELS or _method(name) in _PLACES


def colour_of(method: str) -> str:
    """The colour on paper of a method, or of `base`, `tuned` and `target`: one colour on every page."""
    return LIGHT[_MODELS.get(method) or f"c{place_of(method) % _COLOURS}"]


def colours_of(names: Sequence[str]) -> list[str]:
    """Colours of series: of methods their own, of other names (tasks, rounds) one after the other."""
    if not _of_methods(names):
        return [colour_of(name) if name in _MODELS else LIGHT[f"c{i % _COLOURS}"] for i, name in enumerate(names)]
    return [_paler(colour_of(name), again) for name, again in zip(names, _repeats(names), strict=True)]


def places_of(names: Sequence[str]) -> list[int]:
    """What dash and marker a series has, by the same order."""
    if not _of_methods(names):
        return list(range(len(names)))
    return [place_of(name) + again for name, again in zip(names, _repeats(names), strict=True)]


def _of_methods(names: Sequence[str]) -> bool:
    return any(_method(name) in _PLACES for name in names)


def _repeats(names: Sequence[str]) -> list[int]:
    """How many series of the same method come before each."""
    methods = [name if name in _MODELS else _method(name) for name in names]
    return [methods[:i].count(method) for i, method in enumerate(methods)]


def _paler(colour: str, times: int) -> str:
    """The colour itself, and paler for further series of one method."""
    share = 0.62**times
    return "#" + bytes(round(255 - share * (255 - part)) for part in bytes.fromhex(colour[1:])).hex()


def dash_of(place: int) -> list[int]:
    """Series that share a colour have different dashes."""
    return list(DASHES[place % len(DASHES)])


def marker_of(place: int) -> str:
    return MARKERS[place % len(MARKERS)]


def variables() -> str:
    """The colours as CSS variables. A printed page is light."""

    def listed(colours: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{value};" for name, value in colours.items()) + "}"

    return f"{listed(LIGHT)}\n@media screen and (prefers-color-scheme:dark){{{listed(DARK)}}}\n"


def theme() -> dict[str, Any]:
    """How every figure looks."""
    ink, soft, line = (LIGHT[name] for name in ("ink", "soft", "line"))
    axis = {
        "labelColor": soft,
        "titleColor": soft,
        "domainColor": soft,
        "tickColor": soft,
        "gridColor": line,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titlePadding": 8,
    }
    return {
        "background": LIGHT["paper"],
        "font": 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif',
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"grid": False},
        "axisY": {
            "domain": False,
            "ticks": False,
            "labelLimit": 220,
            "labelPadding": 6,
            # The name of the axis lies above it, where a long one has room.
            "titleAngle": 0,
            "titleAlign": "left",
            "titleBaseline": "bottom",
            "titleX": 0,
            "titleY": -10,
        },
        "legend": {
            "labelColor": ink,
            "titleColor": soft,
            "labelFontSize": 12,
            "titleFontWeight": "normal",
            "offset": 12,
            "gradientLength": 240,
            "gradientThickness": 10,
        },
        "title": {"color": ink, "anchor": "start", "fontSize": 16},
        "text": {"color": ink},
    }


@cache
def resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
