"""Pieces of SVG that all charts share: escaped text, axes, legends and the document around them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape as _escape

from ..text import printable
from . import palette
from .numbers import fit, text_width, wrapped

#: A chart is drawn twice in a page: for screens, and with the same size of letters for phones;
#: unless it is so large that one drawing has to serve both.
WIDE, NARROW, BOTH = 760.0, 340.0, 420.0
TEXT, LINE = 12.0, 16.0
#: White around a chart in a file of its own.
_EDGE = 16.0
_NOT_XML = re.compile("[\ufffe\uffff]")


def visible(text: str) -> str:
    """Text in characters that XML can hold and that do nothing but show."""
    return _NOT_XML.sub("\ufffd", printable(text))


def escape(text: str) -> str:
    """Safe in text and in attributes, of HTML and of XML."""
    return _escape(visible(text), quote=True)


def safe_name(slug: str) -> str:
    """A slug as the name of a file and the start of an id."""
    return re.sub(r"[^a-z0-9._-]+", "-", slug.lower()).strip(".-")[:80] or "figure"


def px(value: float) -> str:
    """A coordinate in a tenth of a pixel."""
    short = f"{value:.1f}".removesuffix(".0")
    return "0" if short == "-0" else short


def text(x: float, y: float, words: str, classes: str = "", full: str = "", extra: str = "") -> str:
    """A line of text; its full form is shown on hovering where it was shortened."""
    title = f"<title>{escape(full)}</title>" if full and full != words else ""
    kind = f' class="{classes}"' if classes else ""
    return f'<text x="{px(x)}" y="{px(y)}"{kind}{extra}>{title}{escape(words)}</text>'


def lines_of(segments: Iterable[tuple[float, float, float, float]], classes: str) -> str:
    """Straight lines as one path."""
    path = "".join(f"M{px(a)} {px(b)}L{px(c)} {px(d)}" for a, b, c, d in segments)
    return f'<path class="{classes}" d="{path}"/>' if path else ""


@dataclass
class Drawing:
    """An SVG while it grows downwards: `bottom` is where the next part may begin."""

    title: str
    slug: str
    x_name: str
    y_name: str
    standalone: bool
    narrow: bool
    one_size: bool = False
    parts: list[str] = field(default_factory=list)
    bottom: float = 4.0

    def __post_init__(self) -> None:
        if self.standalone:
            for line in wrapped(self.title, self.width - 8, 17):
                self.bottom += 22
                self.add(text(4, self.bottom, line, "head", self.title))
            self.bottom += 8

    @property
    def width(self) -> float:
        return BOTH if self.one_size else NARROW if self.narrow else WIDE

    @property
    def silent(self) -> bool:
        """Whether tooltips are left to another drawing of the same chart, whose points have the same order."""
        return self.narrow and not self.one_size and not self.standalone

    def add(self, *parts: str) -> None:
        self.parts += parts

    def id(self, name: str) -> str:
        return f"{safe_name(self.slug)}-{'n' if self.narrow else 'w'}-{name}"

    def point(self, shape: str, head: str, x: str, y: str, note: str = "") -> str:
        """A shape (an element without its end) with its tooltip, as a lone file or as a page needs it.

        The tooltip shows the name of the series as its head, then where, how much, and a remark.
        """
        if self.standalone:
            names = (head, _named(self.x_name, x), _named(self.y_name, y), note)
            words = "\n".join(line for line in names if line)
            return f"{shape}><title>{escape(words)}</title></{shape[1:].split(maxsplit=1)[0]}>"
        if self.silent:
            return f"{shape}/>"
        remark = f' data-n="{escape(note)}"' if note else ""
        return f'{shape} data-x="{escape(x)}" data-y="{escape(y)}"{remark}/>'

    def series(self, index: int, name: str, before: str, points: Iterable[str]) -> None:
        self.add(
            f'<g class="s {palette.series_class(index)}" data-s="{index}"{self.head(name)}>{before}',
            f'<g class="pts">{"".join(points)}</g></g>',
        )

    def head(self, name: str) -> str:
        return "" if self.standalone or self.silent else f' data-h="{escape(name)}"'

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Samples with names, in a row, or in columns where one row is too short. The n-th belongs to series n."""
        sample = 30.0
        shown = [fit(name, self.width - sample - 16, TEXT) for name, _ in entries]
        widths = [sample + 18 + text_width(name, TEXT) for name in shown]
        per_row = len(entries)
        if sum(widths) > self.width:
            per_row = max(1, int(self.width // max(widths)))
            widths = [self.width / per_row if per_row > 1 else max(widths)] * len(entries)
        x = 4.0
        for i, ((name, drawn), short) in enumerate(zip(entries, shown, strict=True)):
            if i % per_row == 0:
                x = 4.0
                self.bottom += LINE + 4
            y = self.bottom - 4
            self.add(
                f'<g class="key {palette.series_class(i)}" data-k="{i}">'
                f'<g transform="translate({px(x)} {px(y)})">{drawn}</g>{text(x + sample, y + 4, short, "", name)}</g>'
            )
            x += widths[i]
        self.bottom += 8 if entries else 0

    def caption(self, words: str) -> None:
        """The name of an axis, above the plot from the left."""
        for line in wrapped(words, self.width - 8, TEXT):
            self.bottom += LINE
            self.add(text(4, self.bottom, line, "soft", words))
        self.bottom += 13 if words else 0

    def say_empty(self, across: Scale, top: float, bottom: float) -> None:
        middle = (across.start + across.end) / 2
        self.add(text(middle, (top + bottom) / 2, "no values to show", "soft mid halo"))

    def document(self, description: str, kind: str) -> str:
        names = f'<title id="{self.id("t")}">{escape(self.title)}</title>'
        names += f'<desc id="{self.id("d")}">{escape(description)}</desc>'
        about = f'role="img" aria-labelledby="{self.id("t")} {self.id("d")}"'
        width, height = self.width, self.bottom + 6
        if self.standalone:
            return self._file(width + 2 * _EDGE, height + 2 * _EDGE, names, about)
        form = "both" if self.one_size else "narrow" if self.narrow else "wide"
        axes = f'data-x="{escape(self.x_name)}" data-y="{escape(self.y_name)}"'
        box = f'viewBox="0 0 {px(width)} {px(height)}"'
        opening = f'<svg class="chart {kind} {form}" {box} {about} tabindex="0" {axes}>'
        return "".join([opening, names, *self.parts, "</svg>"])

    def _file(self, width: float, height: float, names: str, about: str) -> str:
        size = f'width="{px(width)}" height="{px(height)}"'
        box = f'viewBox="{px(-_EDGE)} {px(-_EDGE)} {px(width)} {px(height)}"'
        opening = f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" {size} {box} {about}>'
        style = f"<style>{palette.light_style()}</style>"
        ground = f'<rect x="{px(-_EDGE)}" y="{px(-_EDGE)}" {size} fill="{palette.LIGHT["paper"]}"/>'
        return "".join([opening, names, style, ground, *self.parts, "</svg>\n"])


@dataclass(frozen=True)
class Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    of: Callable[[float], float] = float

    def __call__(self, value: float) -> float:
        low, high = self.of(self.low), self.of(self.high)
        return self.start + (self.of(value) - low) / (high - low) * (self.end - self.start)


def described(names: Sequence[str], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _named(name: str, value: str) -> str:
    return f"{name}: {value}" if name and value else value
