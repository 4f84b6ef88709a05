"""Hypothesis strategies for mutated inputs: bytes, JSON, safetensors files, pickles and archives."""

from __future__ import annotations

import io
import json
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Draw = Callable[[SearchStrategy[Any]], Any]
Json = dict[str, Any]

#: Values that a type or a limit might not hold, and paths that lead elsewhere.
WRONG = [
    *[-(2**63), 2**31, 2**53, 2**63, 2**64, 10**30, 1e308, float("nan"), float("inf"), "\ud800", "\x00", "x" * 5000],
    *["é" * 300, "F32", "F8_E4M3", "Q8", [2**62, 2**62], [2**40] * 8, ["0", "8"], [0.0, 8.0], [-1, 0], [0]],
    *["../secret.safetensors", "/etc/passwd", "..", ".", "a/b", "~root/x", "model.safetensors\x00"],
]
#: Bytes with a meaning in one of the formats.
SNIPPETS = [
    *[b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\n", b'"', b"{", b"}", b"NaN", b"-1e9", b"1e999", b"null", b"../"],
    *[b"\\ud800", b"\x1f\x8b\x08", b"PK\3\4", b"cos\nsystem\n", b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"9" * 5000],
    *[b"[" * depth + b"0" + b"]" * depth for depth in (300, 990, 100_000)],
]
json_values: SearchStrategy[Any] = st.sampled_from(WRONG) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def edited(raw: bytes) -> SearchStrategy[bytes]:
    """Bytes of which one to three runs are replaced, repeated or removed."""

    def changed(changes: list[tuple[int, int, bytes | None]]) -> bytes:
        found = raw
        for start, length, new in changes:
            run = found[start : start + length]
            found = found[:start] + (run * 2 if new is None else new) + found[start + length :]
        return found

    new = st.none() | st.just(b"") | st.binary(max_size=8) | st.sampled_from(SNIPPETS)
    change = st.tuples(st.integers(0, len(raw)), st.sampled_from([0, 1, 1, 4, 20, len(raw)]), new)
    return st.lists(change, min_size=1, max_size=3).map(changed)


def edited_value(value: Any, wrong: SearchStrategy[Any] = json_values) -> SearchStrategy[Any]:
    """A JSON value in which one part is replaced, removed or renamed."""
    changes = [wrong, st.just([value]), *([st.just(value + n) for n in (-1, 1, 2**32)] if type(value) is int else [])]
    if isinstance(value, list):
        value = dict(enumerate(value))
        return edited_value(value, wrong).map(lambda new: list(new.values()) if isinstance(new, dict) else new)
    if isinstance(value, dict) and value:
        keys = st.sampled_from(list(value))
        changes += [keys.map(lambda key: {k: v for k, v in value.items() if k != key})]
        changes += [st.builds(lambda key, new: value | {new: value[key]}, keys, st.text(max_size=8))]
        inside = keys.flatmap(lambda key: edited_value(value[key], wrong).map(lambda new: value | {key: new}))
        return st.one_of(*[inside] * 6, *changes)
    return st.one_of(*changes)


def json_of(value: Any) -> SearchStrategy[bytes]:
    """JSON of an edited value."""
    return edited_value(value).map(lambda edited: json.dumps(edited, skipkeys=True).encode())


def json_file(raw: bytes) -> SearchStrategy[bytes]:
    """A file of JSON, edited as bytes or by its values."""
    return st.one_of(edited(raw), json_of(json.loads(raw)), json_of(json.loads(raw)))


def with_length(header: bytes, data: bytes, length: int | None = None) -> bytes:
    """A safetensors file: the length of the header, the header, the data."""
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def split(raw: bytes) -> tuple[Json, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def tensor_file(raw: bytes) -> SearchStrategy[bytes]:
    """A safetensors file with an edited header, another length of it, or edited bytes."""
    header, data = split(raw)
    text = json.dumps(header).encode()
    lengths = [0, 1, len(text) - 1, len(text) + 1, 2**31, 2**63, 2**64 - 1, 10**8]
    headers = json_of(header).map(lambda other: with_length(other, data))
    return st.one_of(edited(raw), st.sampled_from(lengths).map(lambda n: with_length(text, data, n)), headers, headers)


def tensor_values(raw: bytes) -> SearchStrategy[bytes]:
    """A safetensors file with an infinite, NaN, tiny, huge or negative number in its data."""
    header, data = split(raw)
    words = [b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\1\0\0\0", b"\xff\xff\x7f\x7f", b"\0\0\x80\xbf"]

    def changed(place: int, word: bytes) -> bytes:
        other = data[: 4 * place] + word + data[4 * place + 4 :]
        return with_length(json.dumps(header).encode(), other[: len(data)])

    return st.builds(changed, st.integers(0, max(0, len(data) // 4 - 1)), st.sampled_from(words))


def metadata(raw: bytes) -> SearchStrategy[bytes]:
    """A curvature file with one other entry in its header's metadata."""
    header, data = split(raw)
    own = header["__metadata__"]
    words = ["0", "-1", "1e9", "9" * 19, "١", "3.5", "5", "gram", "diagonal", "log8", "[", '["a"]']

    def changed(key: str, value: str) -> bytes:
        return with_length(json.dumps(header | {"__metadata__": own | {key: value}}).encode(), data)

    return st.builds(changed, st.sampled_from([*own, "kind"]), st.sampled_from(words) | st.text(max_size=20))


def archive(raw: bytes) -> SearchStrategy[bytes]:
    """A zip file with edited bytes, or with one part edited, renamed, lost or compressed."""
    with zipfile.ZipFile(io.BytesIO(raw)) as packed:
        parts = {info.filename: packed.read(info) for info in packed.infolist()}

    def packed_again(name: str, new_name: str, content: bytes, method: int) -> bytes:
        file = io.BytesIO()
        with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as archive:
            warnings.simplefilter("ignore")  # of names that are there twice
            for other, held in parts.items():
                archive.writestr(zipfile.ZipInfo(new_name if other == name else other), held, method)
            archive.writestr(zipfile.ZipInfo(name), content, method)
        return file.getvalue()

    def changed(name: str) -> SearchStrategy[bytes]:
        new_names = st.sampled_from(["x", "../x", "", name + "x", next(iter(parts))])
        methods = st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        return st.builds(packed_again, st.just(name), new_names, edited(parts[name]), methods)

    return edited(raw) | st.sampled_from(sorted(parts)).flatmap(changed)


#: Tensors of types, shapes and values that a checkpoint should not have.
TENSORS = [
    *[torch.zeros(0), torch.tensor(3.0), torch.tensor(float("nan")), torch.tensor(-1), torch.ones(2, 3)],
    *[torch.ones(2, dtype=torch.complex64), torch.ones(4, 4).t(), torch.ones(1).expand(3, 4), torch.tensor([True])],
    *[torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.full((4, 3), float("inf"))],
]


def saved(value: Any, zipped: bool = True) -> bytes:
    """The bytes of `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def torch_file(value: Any) -> SearchStrategy[bytes]:
    """A file of `torch.save`, as an archive or in the older form: with other values in it, or with edited bytes."""
    wrong = json_values.filter(lambda found: "\\ud" not in json.dumps(found))  # pickles hold no half characters
    values = st.builds(saved, edited_value(value, wrong | st.sampled_from(TENSORS)), st.booleans())
    return st.one_of(values, archive(saved(value)), edited(saved(value, zipped=False)))
