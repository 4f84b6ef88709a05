"""The colors of reports, light and dark, and the markers of series."""

from __future__ import annotations

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
#: Models that are not merges.
MODELS = {"base": "soft", "fine-tuned model": "ink", "its own model": "ink", "target": "c9"}
_COLORS = 10
MARKERS = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross")
#: Dark blue to yellow, safe for color-blind readers.
RISING = ("#46226b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")


def colors_of(names: Sequence[str]) -> list[str]:
    """The light colors of series: models have their own, others take one after the other."""
    others = [name for name in names if name not in MODELS]
    numbers = {name: f"c{number % _COLORS}" for number, name in enumerate(others)}
    return [LIGHT[MODELS.get(name) or numbers[name]] for name in names]


def markers_of(names: Sequence[str]) -> list[str]:
    return [MARKERS[i % len(MARKERS)] for i in range(len(names))]


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
    # The title of the upward axis is above it, where a long one has room.
    above = {"titleAngle": 0, "titleAlign": "left", "titleBaseline": "bottom", "titleX": 0, "titleY": -10}
    legend = {"labelColor": ink, "titleColor": soft, "labelFontSize": 12, "titleFontWeight": "normal", "offset": 12}
    return {
        "background": LIGHT["paper"],
        "font": 'system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif',
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"grid": False},
        "axisXQuantitative": {"tickCount": {"expr": "ceil(width / 90)"}},
        "axisYQuantitative": {"tickCount": {"expr": "ceil(height / 50)"}},
        "axisY": {"domain": False, "ticks": False, "labelLimit": 220, "labelPadding": 6, **above},
        "legend": {**legend, "gradientLength": 240, "gradientThickness": 10},
        "title": {"color": ink, "anchor": "start", "fontSize": 16},
        "text": {"color": ink},
    }


@cache
def resource(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
