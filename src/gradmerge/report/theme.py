"""The colors of reports, light and dark, and the dashes and markers of series."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

#: Name → light and dark color. Those of series also differ in lightness, and have a contrast of 3:1 with `paper`.
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
#: Methods in the order of their colors: ten colors, then the same colors with other dashes and markers.
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
_NUMBERS = {method: number for number, method in enumerate(_METHODS)}
#: Models that are not merges.
_MODELS = {"base": "soft", "tuned": "ink", "its own model": "ink", "target": "c9", "best so far": "c4"}
_COLORS = 10
DASHES = ((), (7, 3), (2, 3), (9, 3, 2, 3))
MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
#: Dark blue to yellow, safe for color-blind readers.
RISING = ("#46226b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
#: Blue below a center, orange above it.
CENTERED = ("#1c5c99", "#5f9bd0", "#b5d2ea", "#f4f3ef", "#f3c294", "#e0853a", "#a8480a")


def _method(name: str) -> str:
    """The method of a series: `ties` for `ties 0.5` and `ties, density 0.2`."""
    return re.split("[ ,]", name, maxsplit=1)[0]


def number_of(name: str) -> int:
    """The number of a method, also of one that a user added: the same on every page."""
    known = _NUMBERS.get(_method(name))
    return zlib.crc32(name.encode("utf-8", "replace")) % 1000 if known is None else known


def is_known(name: str) -> bool:
    """Whether a series is a known method or model."""
    return name in _MODELS or _method(name) in _NUMBERS


def color_of(method: str) -> str:
    """The light color of a method or model, the same on every page."""
    return LIGHT[_MODELS.get(method) or f"c{number_of(method) % _COLORS}"]


def colors_of(names: Sequence[str]) -> list[str]:
    """Colors of series: methods have their own, other names (tasks) take one after the other."""
    if not _of_methods(names):
        return [color_of(name) if name in _MODELS else LIGHT[f"c{i % _COLORS}"] for i, name in enumerate(names)]
    return [_paler(color_of(name), again) for name, again in zip(names, _repeats(names), strict=True)]


def numbers_of(names: Sequence[str]) -> list[int]:
    """Numbers of series, which determine dashes and markers."""
    if not _of_methods(names):
        return list(range(len(names)))
    return [number_of(name) + again for name, again in zip(names, _repeats(names), strict=True)]


def _of_methods(names: Sequence[str]) -> bool:
    return any(_method(name) in _NUMBERS for name in names)


def _repeats(names: Sequence[str]) -> list[int]:
    """How many series of the same method come before each series."""
    methods = [name if name in _MODELS else _method(name) for name in names]
    return [methods[:i].count(method) for i, method in enumerate(methods)]


def _paler(color: str, times: int) -> str:
    """The color, paler for further series of the same method."""
    share = 0.62**times
    return "#" + bytes(round(255 - share * (255 - part)) for part in bytes.fromhex(color[1:])).hex()


def dash_of(number: int) -> list[int]:
    """The dash of a series; series with the same color have different dashes."""
    return list(DASHES[number % len(DASHES)])


def marker_of(number: int) -> str:
    return MARKERS[number % len(MARKERS)]


def variables() -> str:
    """The colors as CSS variables. A printed page is light."""

    def listed(colors: dict[str, str]) -> str:
        return ":root{" + "".join(f"--{name}:{value};" for name, value in colors.items()) + "}"

    return f"{listed(LIGHT)}\n@media screen and (prefers-color-scheme:dark){{{listed(DARK)}}}\n"


def chart_config() -> dict[str, Any]:
    """The Vega config of every figure."""
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
            # The title of the axis is above it, where a long one has room.
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
