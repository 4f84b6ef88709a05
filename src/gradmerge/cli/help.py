"""How help is laid out: no name, option or path is ever cut in two, and examples can be copied."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

#: Depending on its version, typer brings its own click or uses the installed one.
PlainContext: Any = TyperCommand.context_class
Run = TypeVar("Run", bound=Callable[..., Any])
#: What stands between the examples of a command.
BETWEEN = "   ·   "
#: Looks like a hyphen, and is none: lines are not broken there.
UNBROKEN = "\u2011"


class HelpFormatter(PlainContext.formatter_class):  # type: ignore[misc]
    """Breaks lines between words only: `./yelp-lora` and `--allow-pickle` stay whole."""

    def write(self, string: str) -> None:
        super().write(string.replace(UNBROKEN, "-"))

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        # Typer puts braces around what must be given; everybody else around nothing.
        super().write_usage(prog, args.translate({ord("{"): None, ord("}"): None, ord("-"): UNBROKEN}), prefix)

    def write_text(self, text: str) -> None:
        super().write_text(text.replace("-", UNBROKEN))

    def write_dl(self, rows: Any, *rest: Any, **more: Any) -> None:
        # Some versions of typer put a backslash before brackets, for rich, although rich does not print this.
        plain = [(first, second.replace("\\[", "[").replace("-", UNBROKEN)) for first, second in rows]
        super().write_dl(plain, *rest, **more)

    def write_examples(self, epilog: str) -> None:
        """Commands, each on lines that a shell takes together."""
        title, _, examples = epilog.partition(": ")
        with self.section(title):
            for example in examples.split(BETWEEN):
                self.write(command_lines(example, self.width - self.current_indent, " " * self.current_indent))


def command_lines(example: str, width: int, indent: str) -> str:
    """A command on lines of so many columns, broken between words only and never between an option and its value."""
    lines = [""]
    for part in _parts(example):
        longer = f"{lines[-1]} {part}".strip()
        if lines[-1] and len(longer) > width - 2 - (4 if len(lines) > 1 else 0):  # room for the backslash
            lines.append(part)
        else:
            lines[-1] = longer
    return textwrap.indent(" \\\n    ".join(lines), indent) + "\n"


def _parts(example: str) -> list[str]:
    """The words of a command, each option with its value."""
    parts: list[str] = []
    for word in shlex.split(example, posix=False):
        if parts and parts[-1].startswith("-") and " " not in parts[-1] and not word.startswith("-"):
            parts[-1] += f" {word}"
        else:
            parts.append(word)
    return parts


class HelpContext(PlainContext):  # type: ignore[misc]
    formatter_class = HelpFormatter


class CommandWithHelp(TyperCommand):
    context_class = HelpContext

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if self.epilog:
            formatter.write_examples(self.epilog)


class GroupWithHelp(TyperGroup):
    context_class = HelpContext
    format_epilog = CommandWithHelp.format_epilog


class Commands(typer.Typer):
    """A group of commands with help that is laid out so; the epilog of one is `Examples: one   ·   another`."""

    def __init__(self, *, cls: type[TyperGroup] = GroupWithHelp, **more: Any) -> None:
        super().__init__(cls=cls, no_args_is_help=True, **more)

    def command(self, name: str | None = None, **more: Any) -> Callable[[Run], Run]:
        return super().command(name, cls=CommandWithHelp, **more)
