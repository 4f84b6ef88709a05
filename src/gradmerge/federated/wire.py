"""What crosses between server and clients: numbers, texts, and tensors as safetensors.

Nothing in a message is code or a path, and reading it makes nothing but numbers, texts and tensors in memory. Nothing
is unpickled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor, nn

from ..refinement.points import Point, trained
from ..storage.bytesof import bytes_of

if TYPE_CHECKING:
    from flwr.app import RecordDict

SCHEMA = "gradmerge-federated/1"
#: How tensors are laid out.
LAYOUT = "safetensors"
TYPES = (torch.float32, torch.float64)
FACTS, TENSORS = "facts", "tensors"
#: Characters of a text at most.
LONGEST_TEXT = 2000

Facts = dict[str, Any]
Groups = dict[str, dict[str, Tensor]]


class Malformed(ValueError):
    """A message that is not as it should be; the text says how, in words that hold nothing of what was sent."""


def packed(facts: Mapping[str, Any], groups: Mapping[str, Point] | None = None) -> RecordDict:
    """A message's content, of facts (numbers, texts, lists of them) and groups of tensors.

    All tensors are one array of Flower's: each array is a request or more over the network.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    content = RecordDict({FACTS: ConfigRecord({"schema": SCHEMA, **facts})})
    named = {f"{group}/{name}": value for group, tensors in (groups or {}).items() for name, value in tensors.items()}
    if named:
        data = save({name: value.detach().cpu().contiguous().numpy() for name, value in named.items()})
        content[TENSORS] = ArrayRecord({TENSORS: Array("uint8", (len(data),), LAYOUT, data)})
    return content


def unpacked(content: RecordDict) -> tuple[Facts, Groups]:
    """The facts and tensors of a message."""
    if set(content) - {FACTS, TENSORS} or FACTS not in content.config_records:
        raise Malformed("holds records that it should not, or lacks its facts")
    facts: Facts = dict(content.config_records[FACTS])
    if facts.pop("schema", None) != SCHEMA:
        raise Malformed(f"is not of the form {SCHEMA}: another version of gradmerge may have sent it")
    if any(isinstance(value, str) and len(value) > LONGEST_TEXT for value in facts.values()):
        raise Malformed("holds a text that is too long")
    groups: Groups = {}
    if TENSORS in content:
        arrays = content.array_records.get(TENSORS)
        if arrays is None or list(arrays) != [TENSORS] or arrays[TENSORS].stype != LAYOUT:
            raise Malformed("holds tensors in another form than safetensors")
        try:
            named = load(arrays[TENSORS].data)
        except (SafetensorError, ValueError, OverflowError) as error:
            raise Malformed("holds tensors that cannot be read") from error
        for key, value in named.items():
            if value.dtype not in TYPES:
                raise Malformed("holds a tensor of another type than float32 and float64")
            group, _, name = key.partition("/")
            groups.setdefault(group, {})[name] = value
    return facts, groups


def number(facts: Mapping[str, Any], name: str, *, least: float = -math.inf, whole: bool = False) -> float:
    """A finite number of a message."""
    value = facts.get(name)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float) or not math.isfinite(value):
        raise Malformed(f"{name} is not a finite number")
    if value < least:
        raise Malformed(f"{name} is less than {least:g}")
    return value


def digest(*points: Point) -> str:
    """What tells these tensors from others: names, types, shapes and values."""
    found = hashlib.sha256()
    for point in points:
        for name, value in point.items():
            plain = value.detach().cpu().contiguous()
            found.update(f"{name}\0{plain.dtype}\0{tuple(plain.shape)}\0".encode())
            found.update(bytes_of(plain.reshape(-1)))
        found.update(b"\1")
    return found.hexdigest()


def weights(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are refined: what is sent with every question."""
    return {name: parameter.detach() for name, parameter in trained(model).items()}


def structure(model: nn.Module) -> str:
    """What must be the same on both sides beside the weights that are sent: shapes, labels, and all other tensors."""
    own = trained(model)
    rest = {name: value for name, value in model.state_dict().items() if name not in own}
    aliases = {id(parameter) for parameter in own.values()}
    tied = {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in aliases}
    rest = {name: value for name, value in rest.items() if name not in tied}
    labels = getattr(getattr(model, "config", None), "id2label", None)
    told = [type(model).__name__, str(sorted((labels or {}).items()))]
    told += [f"{name} {p.dtype} {tuple(p.shape)}" for name, p in own.items()]
    return hashlib.sha256("\n".join([*told, digest(rest)]).encode()).hexdigest()
