"""Check the arguments of public functions against their annotations."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, TypeVar, Union, cast, get_args, get_origin

from .errors import InputError
from .text import nearest

Function = TypeVar("Function", bound=Callable[..., Any])

#: Annotations that accept more than their own class.
ACCEPTED: dict[Any, Any] = {int: Integral, float: Real, Path: os.PathLike}


def checked(*unchecked: str) -> Callable[[Function], Function]:
    """Check arguments at every call, except those named; raise InputError if one does not fit."""

    def decorate(function: Function) -> Function:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(TypeError):  # missing and unknown arguments: the call below raises
                for name, value in inspect.signature(function).bind(*args, **kwargs).arguments.items():
                    if name not in ("loading", *unchecked):
                        check(name, value, annotation(function, name))
            return function(*args, **kwargs)

        return cast(Function, call)

    return decorate


@functools.cache
def annotation(function: Callable[..., Any], name: str) -> Any:
    """Return the type of a parameter; Any if it has none."""
    function = inspect.unwrap(function)
    return eval(str(function.__annotations__.get(name, "Any")), function.__globals__ | {"Any": Any}, _HeavyNames())


class _HeavyNames(dict[str, Any]):
    """The names that some modules import only for type checkers, because they need PyTorch."""

    #: Those that gradmerge does not export, and their modules.
    HEAVY: ClassVar[dict[str, str]] = {"nn": "torch", "ExampleLoss": "gradmerge.curvature.losses"} | dict.fromkeys(
        ("Overrides", "Weights"), "gradmerge.compare.settings"
    )

    def __missing__(self, name: str) -> Any:
        import gradmerge

        if name in self.HEAVY:
            return getattr(importlib.import_module(self.HEAVY[name]), name)
        if name not in gradmerge.__all__:
            raise KeyError(name)
        return getattr(gradmerge, name)


@functools.cache
def argument_help(function: Callable[..., Any]) -> dict[str, str]:
    """Return the description of each parameter in the `Args` of a function's docstring.

    Of parameters "as of" another public function, it is the description there.
    """
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(function) or "", re.S | re.M)
    items = re.findall(r"^    (\w[\w, ]*): (.*?)(?=^    \w|\Z)", section[1] if section else "", re.S | re.M)
    found: dict[str, str] = {}
    for names, text in items:
        other = re.match(r"As of :func:`gradmerge\.(\w+)`", text)
        known = argument_help(_HeavyNames()[other[1]]) if other else {}
        found |= {name: known.get(name, re.sub(r"\s+", " ", text).strip()) for name in names.split(", ")}
    return found


@functools.cache
def attribute_help(kind: type) -> dict[str, str]:
    """Return the docstrings of a class's attributes, which follow them in the source."""
    body: list[Any] = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    return {
        item.target.id: inspect.cleandoc(following.value.value).replace("\n", " ")
        for item, following in itertools.pairwise(body)
        if hasattr(item, "target") and not hasattr(following, "target")
    }


def check(name: str, value: Any, hint: Any) -> None:
    """Raise InputError if a value does not fit an annotation. Checks the items of containers of text."""
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    fitting = [option for option in options if _fits(value, option)]
    if not fitting:
        names = ["None" if option is NoneType else inspect.formatannotation(option) for option in options]
        expected = " or ".join(names).replace("collections.abc.", "").replace("Literal", "one of ")
        text = repr(value).replace("\n", " ")
        raise InputError(f"{name} must be {expected}, not {text[:60]} ({type(value).__name__})")
    if get_args(fitting[0])[-1:] == (str,):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            check(f"{name}[{key!r}]", item, str)


def check_known(what: str, value: str, known: Iterable[str]) -> None:
    """Raise InputError if a word is not one of those known; ``what`` names the argument."""
    if value not in known:
        raise InputError(f"{what}: known are {', '.join(known)}{nearest(value, known)}")


def _fits(value: Any, option: Any) -> bool:
    kind = get_origin(option) or option
    if kind is Any:
        return True
    if kind is Literal:
        return value in get_args(option)
    if isinstance(value, bool):
        return kind is bool
    if kind in (Sequence, Iterable) and isinstance(value, str | bytes | Mapping):
        return False
    return isinstance(value, ACCEPTED.get(kind, kind)) or (kind is Sequence and hasattr(value, "__array__"))
