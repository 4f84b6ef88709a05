"""Which tensors belong to which of a model's numbered layers, by their names alone.

A *stack* is what is numbered: `model.layers.` of Llama, `transformer.h.` of GPT-2, or two of them, `encoder.block.` and
`decoder.block.` of T5. Numbers deeper inside (experts, the parts of a block of T5) and in front (`0.auto_model.` of
sentence-transformers) are no layers, nor are the parts of an `nn.Sequential`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)\.")


def layer_stacks(names: Iterable[str]) -> dict[str, int]:
    """Prefix → number of layers, for every stack of layers among these tensors, in the order of their names.

    >>> layer_stacks(["model.embed.weight", "model.layers.0.mlp.fc.weight", "model.layers.1.mlp.fc.weight"])
    {'model.layers.': 2}
    """
    return dict(_stacks([(name, 0) for name in names]))


def _stacks(names: Iterable[tuple[str, int]]) -> Iterable[tuple[str, int]]:
    """The stacks among names of which the first so many characters are dealt with."""
    groups: dict[str, list[tuple[str, int, int]]] = {}
    for name, start in names:
        if found := _NUMBER.search(name, start):
            groups.setdefault(name[: found.start()], []).append((name, int(found[1]), found.end()))
    for prefix, group in groups.items():
        layers: dict[int, set[str]] = {}
        for name, number, end in group:
            layers.setdefault(number, set()).add(name[end:])
        if _are_layers(prefix, layers):
            yield prefix, max(layers) + 1
        else:
            yield from _stacks((name, end) for name, _, end in group)


def _are_layers(prefix: str, layers: Mapping[int, set[str]]) -> bool:
    """Layers repeat one another: each has a tensor that the first has. A single one has modules in it, and a name.

    Parts of an `nn.Sequential` share no tensor, or leave out numbers for what has no weights.
    """
    first = layers[min(layers)]
    if not all(first & names for names in layers.values()):
        return False
    if any("." in name for names in layers.values() for name in names):
        return len(layers) > 1 or (prefix != "" and 0 in layers)
    return len(layers) > 1 and len(layers) == max(layers) + 1


def place_of(name: str, stacks: Iterable[str]) -> tuple[str, int] | None:
    """(stack, number) of the layer that a tensor belongs to; None if it is outside the layers.

    >>> place_of("model.layers.3.mlp.experts.7.w1.weight", ["model.layers."])
    ('model.layers.', 3)
    """
    for prefix in stacks:
        if name.startswith(prefix) and (found := _NUMBER.match(name, len(prefix))):
            return prefix, int(found[1])
    return None


def layer_of(name: str, stacks: Iterable[str]) -> int | None:
    """The number of the layer that a tensor belongs to, in its stack; None if it is outside the layers."""
    found = place_of(name, stacks)
    return None if found is None else found[1]


#: What a model reads, as opposed to what it gives out: embeddings, and what is done with them before the first layer.
_BEFORE = re.compile(
    r"emb(?!ed_out)|\bwte\b|\bwpe\b|^shared\.|relative_pe|patch_conv|\bln_pre|layernorm_pre|\bpre_layr|\bpre_layernorm"
    r"|\.conv[12]\.|feature_"
)
#: What turns images and sound into what language models read.
TOWER = re.compile("vision|visual|multi_modal|audio|image")


def is_before_layers(name: str, stack: str = "") -> bool:
    """Whether a tensor outside the layers belongs before them, as embeddings do, and not after them, as heads do."""
    other_tower = TOWER.search(name) is not None and TOWER.search(stack) is None
    return other_tower or _BEFORE.search(name) is not None
