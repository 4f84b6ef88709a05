"""Methods from Python files: `method: ./my_rule.py`."""

from __future__ import annotations

import hashlib
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

from ..errors import InputError
from ..rules import METHODS, Rule
from ..urls import is_url


def is_rule_file(method: Any) -> TypeGuard[str]:
    """Return whether a recipe's `method` is a Python file and not a name."""
    return isinstance(method, str) and method.endswith(".py")


def load_rule(method: str, folder: Path, *, allow_code: bool) -> Rule:
    """Run a Python file that defines one rule with @rule, and add the rule to METHODS.

    The rule knows the path as written (``file``) and the SHA-256 of the file's content (``digest``).
    """
    path = Path(method).expanduser()
    if is_url(method) or (is_url(folder) and not path.is_absolute()):
        raise InputError(f"method: {method}: a rule must be a file on this machine, not at a URL")
    path = folder / path
    if not allow_code:
        raise InputError(
            f"method: {method} is Python code that the merge would run. Read {path}; if you trust it, set "
            "allow_code=True (--allow-code on the command line)"
        )
    try:
        source = path.read_bytes()
    except OSError as error:
        raise InputError(f"method: {path}: cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(source).hexdigest()
    module = ModuleType(f"gradmerge_rule_{digest[:16]}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses look up their module
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f"{path}, line {lines[-1]}" if lines else path
        raise InputError(f"method: {where}: {type(error).__name__}: {error}") from error
    values = {id(value): value for value in vars(module).values() if isinstance(value, Rule)}
    rules = [rule for rule in values.values() if rule.function.__module__ == module.__name__]
    if len(rules) != 1:
        names = f" ({', '.join(rule.name for rule in rules)})" if rules else ""
        raise InputError(f"method: {path}: defines {len(rules)} rules{names}; it must define one function with @rule")
    try:
        return METHODS.add(replace(rules[0], file=method, digest=digest))
    except Exception as error:  # also from evaluating the annotations of the file
        raise InputError(f"method: {path}: {error}") from error
