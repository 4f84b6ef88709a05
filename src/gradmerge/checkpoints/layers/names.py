"""Assign tensors to numbered layers by their names.

A *stack* is a sequence of layers with a common prefix: `model.layers.` in Llama, `transformer.h.` in GPT-2, and both
`encoder.block.` and `decoder.block.` in T5. Other numbers are not layers: experts and parts of a T5 block (deeper in
the name), `0.auto_model.` of sentence-transformers (further up), and the parts of an `nn.Sequential`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)\.")
#: Tensors before the first layer: embeddings and what is applied to them. All others outside the layers come after.
_BEFORE = re.compile(
    r"emb(?!ed_out)|\bwte\b|\bwpe\b|^shared\.|relative_pe|patch_conv|\bln_pre|layernorm_pre|\bpre_layr|\bpre_layernorm"
    r"|\.conv[12]\.|feature_"
)
#: Parts of a model that turn images or audio into inputs of the language model.
TOWER = re.compile("vision|visual|multi_modal|audio|image")


def layer_stacks(names: Iterable[str]) -> dict[str, int]:
    """Return prefix → number of layers for every stack, in the order of the names.

    >>> layer_stacks(["model.embed.weight", "model.layers.0.mlp.fc.weight", "model.layers.1.mlp.fc.weight"])
    {'model.layers.': 2}
    """
    return dict(_stacks([(name, 0) for name in names]))


def _stacks(names: Iterable[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield the stacks among pairs of a name and the position where the search for a number starts."""
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for name, start in names:
        if match := _NUMBER.search(name, start):
            groups.setdefault(name[: match.start()], []).append((name, int(match[1]), match.end()))
    for prefix, group in groups.items():
        layers: dict[int, set[str]] = {}
        for name, number, end in group:
            layers.setdefault(number, set()).add(name[end:])
        if _are_layers(prefix, layers):
            yield prefix, max(layers) + 1
        else:
            yield from _stacks((name, end) for name, _, end in group)


def _are_layers(prefix: str, layers: Mapping[int, set[str]]) -> bool:
    """Return whether numbered modules are layers: each of them shares a tensor with the first.

    The parts of an `nn.Sequential` share no tensor, or skip the numbers of parts without weights. A single layer must
    contain modules and have a prefix.
    """
    first = layers[min(layers)]
    if not all(first & names for names in layers.values()):
        return False
    if any("." in name for names in layers.values() for name in names):
        return len(layers) > 1 or (prefix != "" and 0 in layers)
    return len(layers) > 1 and len(layers) == max(layers) + 1


def place_of(name: str, stacks: Iterable[str]) -> tuple[str, int] | None:
    """Return (stack, number) of the layer of a tensor, or None if it is outside the layers.

    >>> place_of("model.layers.3.mlp.experts.7.w1.weight", ["model.layers."])
    ('model.layers.', 3)
    """
    for prefix in stacks:
        if name.startswith(prefix) and (match := _NUMBER.match(name, len(prefix))):
            return prefix, int(match[1])
    return None


def layer_of(name: str, stacks: Iterable[str]) -> int | None:
    """Return the number of the layer of a tensor, or None if it is outside the layers."""
    place = place_of(name, stacks)
    return None if place is None else place[1]


def is_before_layers(name: str, stack: str = "") -> bool:
    """Return whether a tensor outside the layers comes before them, as embeddings do, or after them, as heads do."""
    in_other_tower = TOWER.search(name) is not None and TOWER.search(stack) is None
    return in_other_tower or _BEFORE.search(name) is not None
