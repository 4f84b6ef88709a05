"""Arguments of public functions, held against their annotations: what does not fit is an InputError that says so."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from .errors import InputError
from .text import nearest
from .urls import UrlPath, as_url, redact_urls

Function = TypeVar("Function", bound=Callable[..., Any])
#: Annotations that stand for more than the class that they name.
_WIDER = {int: Integral, float: Real, Path: os.PathLike}
_IN_WORDS: dict[Any, str] = {
    bool: "True or False",
    Integral: "a whole number",
    Real: "a number",
    str: "text",
    os.PathLike: "a path",
}
_IN_WORDS |= {Mapping: "a mapping", Sequence: "a list", Iterable: "batches", Callable: "a function", NoneType: "None"}


def checked(*own: str) -> Callable[[Function], Function]:
    """Arguments are checked at every call, but the function's ``own``; a missing one stays Python's TypeError."""

    def decorate(function: Function) -> Function:
        signature, hints = inspect.signature(function), functools.cache(lambda: get_type_hints(function))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(TypeError):  # which the call below explains better
                for name, value in signature.bind(*args, **kwargs).arguments.items():
                    if name in hints() and name not in ("loading", *own):
                        check(name, value, hints()[name])
            return function(*map(_shown, args), **{name: _shown(value) for name, value in kwargs.items()})

        return cast(Function, call)

    return decorate


def _shown(value: Any) -> Any:
    """An argument without the passwords and signatures of URLs, which nothing may print or write."""
    if isinstance(value, Path):
        return UrlPath(url) if (url := as_url(value)) is not None else value
    if type(value) is dict:  # such as of tasks and their data
        return {key: _shown(item) for key, item in value.items()}
    return redact_urls(value) if isinstance(value, str) else value


def check(name: str, value: Any, hint: Any) -> None:
    """Raise an InputError if a value is not what an annotation says; of what is inside, texts are looked at."""
    several = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds: list[Any] = [_WIDER.get(get_origin(one) or one, get_origin(one) or one) for one in several]
    fitting = [one for one, kind in zip(several, kinds, strict=True) if kind is Any or _fits(value, kind)]
    if not fitting:
        kinds = [kind for kind in kinds if kind is not str or Path not in several]
        words = [_IN_WORDS.get(kind) or f"a {kind.__name__}" for kind in kinds]
        text = repr(value).replace("\n", " ")
        text = text if len(text) <= 60 else f"{text[:59]}… ({type(value).__name__})"
        expected = ", ".join(words[:-1]) + " or " * (len(words) > 1) + words[-1]
        raise InputError(f"{name} is {text}, but must be {expected}")
    if get_args(fitting[0])[-1:] == (str,):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            check(f"{name}[{key!r}]", item, str)


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind in (Sequence, Iterable) and isinstance(value, str | bytes | Mapping):
        return False
    return isinstance(value, kind) or (kind is Sequence and hasattr(value, "__array__"))


def check_known(what: str, value: str, known: Iterable[str]) -> None:
    """Raise an InputError unless a word is one of those that are known; ``what`` names it with its option."""
    if value not in known:
        raise InputError(f"{what}: known are {', '.join(known)}{nearest(value, known)}")
