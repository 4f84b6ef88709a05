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
    variables = {
        "page": "body_background_fill background_fill_secondary",
        "paper": "background_fill_primary block_background_fill input_background_fill checkbox_background_color "
        "checkbox_label_background_fill button_secondary_background_fill button_primary_text_color "
        "panel_background_fill",
        "ink": "body_text_color block_label_text_color block_title_text_color button_secondary_text_color "
        "accordion_text_color table_text_color",
        "soft": "body_text_color_subdued block_info_text_color checkbox_border_color",
        "line": "block_border_color border_color_primary input_border_color checkbox_label_border_color "
        "button_secondary_border_color panel_border_color",
        "accent": "border_color_accent input_border_color_focus checkbox_background_color_selected "
        "checkbox_border_color_selected slider_color loader_color link_text_color button_primary_background_fill "
        "button_primary_background_fill_hover button_primary_border_color",
        "wash": "color_accent_soft checkbox_label_background_fill_hover checkbox_label_background_fill_selected "
        "button_secondary_background_fill_hover",
        "hole": "code_background_fill",
    }
    both = {name: color for color, names in variables.items() for name in names.split()}
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
