"""YAML from elsewhere: no tags that run code, no duplicate keys, nothing that grows without end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from .errors import InputError

MAX_NODES = 20_000
#: Characters of a number.
LONGEST_NUMBER = 10_000


class _Loader(yaml.SafeLoader):
    """Safe YAML without duplicate keys, endless numbers, or numbers to the base of 60."""

    nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self.nodes += 1
        if self.nodes > MAX_NODES:
            raise ValueError(f"it has more than {MAX_NODES} values, the limit for a recipe")
        return super().compose_node(parent, index)

    def construct_number(self, node: yaml.ScalarNode) -> int | float | str:
        text = self.construct_scalar(node)
        if len(text) > LONGEST_NUMBER:
            raise yaml.constructor.ConstructorError(
                None, None, f"a number of {len(text)} characters; {LONGEST_NUMBER} is the limit", node.start_mark
            )
        if ":" in text:  # only YAML 1.1 takes 1:30 for 60 · 1 + 30, and it is slow at that
            return text
        construct = self.construct_yaml_int if node.tag.endswith(":int") else self.construct_yaml_float
        number: int | float = construct(node)
        return number

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is not None and key in seen:
                problem = f"the key {key!r} occurs twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)


Lines = dict[tuple[str | int, ...], int]
"""The keys and places in lists that lead to a value → the line that it stands on."""


def parse_yaml(raw: bytes | str, where: str) -> Any:
    """YAML from an untrusted source: no tags that run code, no duplicate keys, no aliases that blow up."""
    return _parse(raw, where, several=False)[0][0]


def parse_documents(raw: bytes | str, where: str) -> list[tuple[Any, Lines]]:
    """The same of a text of one document or more; each with the lines that its values stand on."""
    return _parse(raw, where, several=True)


def _parse(raw: bytes | str, where: str, several: bool) -> list[tuple[Any, Lines]]:
    try:
        loader = _Loader(raw)
        every = list(_nodes(loader)) if several else [loader.get_single_node()]
        nodes = [node for node in every if node is not None and not (several and _is_empty(node))]
        if not nodes:
            raise InputError(f"{where}: is empty")
        if sum(_expanded_size(node, {}, set()) for node in nodes) > MAX_NODES:
            raise InputError(f"{where}: its aliases stand for more than {MAX_NODES} values; that is no recipe")
        found = []
        for node in nodes:
            lines: Lines = {}
            if several:
                _find_lines(node, (), lines)
            found.append((loader.construct_document(node), lines))
        return found
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise InputError(f"{where}{line}: not valid YAML: {problem}") from None
    except (IndexError, KeyError, AttributeError, TypeError, OverflowError):  # how PyYAML fails on such as `!!bool x`
        raise InputError(f"{where}: not valid YAML: a value does not fit its tag") from None
    except RecursionError:
        raise InputError(f"{where}: nested too deeply; that is no recipe") from None


def _nodes(loader: _Loader) -> Iterator[yaml.Node | None]:
    while loader.check_node():
        yield loader.get_node()


def _is_empty(node: yaml.Node) -> bool:
    """A document without a value, as after a last `---`."""
    return isinstance(node, yaml.ScalarNode) and node.value == ""


def _find_lines(node: yaml.Node, path: tuple[str | int, ...], lines: Lines) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                lines[*path, key.value] = key.start_mark.line + 1
                _find_lines(value, (*path, key.value), lines)
    elif isinstance(node, yaml.SequenceNode):
        for place, value in enumerate(node.value):
            _find_lines(value, (*path, place), lines)


def _expanded_size(node: yaml.Node, sizes: dict[int, int], above: set[int]) -> int:
    """How many values a node stands for once every alias in it is written out."""
    if id(node) in above:
        raise ValueError("an alias refers to itself")
    if id(node) not in sizes:
        above.add(id(node))
        below = node.value if isinstance(node, yaml.CollectionNode) else []
        children = [c for pair in below for c in pair] if isinstance(node, yaml.MappingNode) else below
        sizes[id(node)] = 1 + sum(_expanded_size(child, sizes, above) for child in children)
        above.discard(id(node))
    return sizes[id(node)]
