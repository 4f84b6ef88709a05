"""Read YAML from untrusted files (no tags that run code, no duplicate keys, bounded size), and write YAML."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from .errors import InputError
from .text import printable

MAX_NODES = 20_000
"""The most values that a text may have, with every alias expanded."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that rejects duplicate keys and large texts, and reads 1:30 as text."""

    def __init__(self, stream: bytes | str) -> None:
        super().__init__(stream)
        self._count = 0
        self._sizes: dict[yaml.Node, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._count += 1
        is_alias = self.check_event(yaml.AliasEvent)
        node = super().compose_node(parent, index)
        assert node is not None
        if node not in self._sizes:
            if is_alias:
                raise ValueError("an alias stands for a value around it")
            parts = node.value if isinstance(node, yaml.CollectionNode) else []
            children = [part for pair in parts for part in pair] if isinstance(node, yaml.MappingNode) else parts
            self._sizes[node] = 1 + sum(self._sizes[child] for child in children)
        if max(self._count, self._sizes[node]) > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} values")
        return node

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        if ":" in node.value:  # YAML 1.1 reads 1:30 as 60 · 1 + 30, in quadratic time
            return str(node.value)
        construct = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        number: int | float = construct(node)
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"the key {key.value!r} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else None)
        return super().construct_mapping(node, deep)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


def parse_yaml(raw: bytes | str, where: str) -> Any:
    """Return the value of a text with one document; ``where`` names the text in errors."""
    documents = parse_documents(raw, where)
    if len(documents) > 1:
        raise InputError(f"{where}: has {len(documents)} YAML documents; give one")
    return documents[0]


def parse_documents(raw: bytes | str, where: str) -> list[Any]:
    """Return the value of every document that is not empty."""
    try:
        loader = _Loader(raw)
        nodes: list[yaml.Node] = []
        while loader.check_node():
            nodes += filter(None, [loader.get_node()])
        documents = [
            loader.construct_document(node)
            for node in nodes
            if not (isinstance(node, yaml.ScalarNode) and node.value == "")
        ]
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise InputError(f"{where}{line}: not valid YAML: {problem}") from None
    except (IndexError, KeyError, AttributeError, TypeError, OverflowError):  # PyYAML on tags such as `!!bool x`
        raise InputError(f"{where}: not valid YAML: a value does not fit its tag") from None
    except RecursionError:
        raise InputError(f"{where}: not valid YAML: it is nested too deeply") from None
    if not documents:
        raise InputError(f"{where}: is empty")
    return documents


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return YAML without aliases, and with lists of numbers on one line. Control characters are escaped."""
    text = yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text if printable(text) == text else yaml.dump(dict(value), Dumper=_Dumper, sort_keys=False)


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, _: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    numbers = bool(values) and all(isinstance(value, int | float) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=numbers or None)


_Dumper.add_representer(list, _represent_list)
