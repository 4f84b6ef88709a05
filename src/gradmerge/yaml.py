"""Read YAML without tags that run code and without duplicate keys, and write YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from .errors import InputError
from .text import first_line, printable
from .urls import redact


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in keys:
                problem = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            keys.add(key.value)
        return super().construct_mapping(node, deep)


def parse_yaml(raw: bytes | str, where: str) -> Any:
    """Return the value of a text with one document; ``where`` names the text in errors."""
    documents = parse_documents(raw, where)
    if len(documents) > 1:
        raise InputError(f"{where}: has {len(documents)} YAML documents; give one")
    return documents[0]


def parse_documents(raw: bytes | str, where: str) -> list[Any]:
    """Return the value of every document that is not empty."""
    documents = []
    try:
        loader = _Loader(raw)
        while loader.check_node():
            node = loader.get_node()
            if not isinstance(node, yaml.ScalarNode) or node.value != "":
                documents.append(loader.construct_document(node))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise InputError(f"{where}{line}: not valid YAML: {problem}") from None
    except Exception as error:  # PyYAML on a tag such as `!!bool x`, a date such as 2001-99-99, or deep nesting
        raise InputError(f"{where}: not valid YAML: a value does not fit its type ({first_line(error)})") from None
    if not documents:
        raise InputError(f"{where}: is empty")
    return documents


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML without aliases, with lists of numbers on one line, and without secrets of URLs.

    Control characters are escaped.
    """
    text = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return redact(text if printable(text) == text else yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False))


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    numbers = bool(values) and all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers or None)


_Dumper.add_representer(list, _represent_list)
