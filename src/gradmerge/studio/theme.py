"""The look of the page: colors as in reports, system fonts, and the scripts that run in the browser."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import gradio as gr

from ..report import theme as report_theme
from ..report.page import drawing, library

#: Until the new numbers arrive, those on the board are of an earlier move.
DIM_BOARD = "() => { window.gradmergeDim(); return []; }"
CHOSEN_ROW = "() => [window.gradmergeTaken]"
COPY = "(text) => { window.gradmergeCopy(text); return []; }"
_SANS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "DejaVu Sans Mono", "monospace"]
SCRIPT = "/studio.js"


def theme() -> Any:
    """The plainest theme of Gradio in the colors of reports; it names system fonts, so that none are downloaded."""
    both = {
        "body_background_fill": "page",
        "body_text_color": "ink",
        "body_text_color_subdued": "soft",
        "background_fill_primary": "paper",
        "background_fill_secondary": "page",
        "block_background_fill": "paper",
        "block_border_color": "line",
        "block_label_text_color": "ink",
        "block_title_text_color": "ink",
        "block_info_text_color": "soft",
        "border_color_primary": "line",
        "border_color_accent": "accent",
        "color_accent_soft": "wash",
        "input_background_fill": "paper",
        "input_border_color": "line",
        "input_border_color_focus": "accent",
        "checkbox_background_color": "paper",
        "checkbox_background_color_selected": "accent",
        "checkbox_border_color": "soft",
        "checkbox_border_color_selected": "accent",
        "checkbox_label_background_fill": "paper",
        "checkbox_label_background_fill_hover": "wash",
        "checkbox_label_background_fill_selected": "wash",
        "checkbox_label_border_color": "line",
        "slider_color": "accent",
        "loader_color": "accent",
        "link_text_color": "accent",
        "button_secondary_background_fill": "paper",
        "button_secondary_background_fill_hover": "wash",
        "button_secondary_border_color": "line",
        "button_secondary_text_color": "ink",
        "button_primary_background_fill": "accent",
        "button_primary_background_fill_hover": "accent",
        "button_primary_border_color": "accent",
        "button_primary_text_color": "paper",
        "panel_background_fill": "paper",
        "panel_border_color": "line",
        "accordion_text_color": "ink",
        "table_text_color": "ink",
        "code_background_fill": "hole",
    }
    made = gr.themes.Base(font=_SANS, font_mono=_MONO, radius_size=gr.themes.sizes.radius_md)
    known = set(vars(made))
    colors = {name: report_theme.LIGHT[color] for name, color in both.items() if name in known}
    colors |= {f"{name}_dark": report_theme.DARK[color] for name, color in both.items() if f"{name}_dark" in known}
    return made.set(**colors)


@cache
def style() -> str:
    def listed(where: str, colors: dict[str, str]) -> str:
        return where + "{" + "".join(f"--gm-{name}:{value};" for name, value in colors.items()) + "}"

    return listed(":root", report_theme.LIGHT) + listed("body.dark", report_theme.DARK) + _read("studio.css")


def head() -> str:
    return f'<script src="{SCRIPT}" defer></script>'


@cache
def script() -> str:
    """Vega, Vega-Lite and what draws with them: the browser asks no other host for them."""
    turned = {color: f"var(--gm-{name})" for name, color in report_theme.LIGHT.items()}
    return "\n;".join([library(), drawing(), f"window.gradmergeColors = {json.dumps(turned)};", _read("studio.js")])


def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
