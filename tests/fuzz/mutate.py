"""Strategies for mutated inputs: bytes, JSON, YAML, safetensors files, pickles and archives."""

from __future__ import annotations

import io
import json
import pickletools
import warnings
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

Draw = Callable[[SearchStrategy[Any]], Any]
Json = dict[str, Any]

PATHS = [
    *["../secret.safetensors", "../../secret.safetensors", "/etc/passwd", "..", ".", "a/b", "a\\b", "~", "~root/x"],
    *["file:///etc/passwd", "model.safetensors\x00", "%2e%2e/secret.safetensors", "..\u2215secret.safetensors"],
]
#: Values that a type or a limit might not hold.
WRONG = [
    *[-(2**63), 2**31, 2**53, 2**63, 2**64, 10**30, 1e308, float("nan"), float("inf"), "\ud800", "\x00", "x" * 5000],
    *["é" * 300, "F32", "F8_E4M3", "C64", "Q8", [2**62, 2**62], [2**40] * 8, ["0", "8"], [0.0, 8.0], [-1, 0], [0]],
]
#: Bytes with a meaning in one of the formats.
SNIPPETS = [
    *[b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r\n\r\n", b"\t", b'"', b"'", b",,,,", b": "],
    *[b"{", b"}", b"[[[[", b"]]]]", b"NaN", b"-1e9", b"1e999", b"9" * 400, b"0x10", b"null", b"&a [*a]", b"<<: *a"],
    *[b"!!python/object:os.system x", b"!!binary x", b"---", b"%YAML 9.9", b"1:2:3:4:5", b"2001-99-99", b"\x1b[2J"],
    *[b"\xe2\x80\xae", b"<script>", b"=cmd|' /C calc'!A0", b"../", b"\\ud800", b"\\u0000", b"\x1f\x8b\x08", b"PK\3\4"],
    *[b"[" * depth + b"0" + b"]" * depth for depth in (300, 950, 990, 100_000)],
    *[b"9" * 5000, b'{"a":' * 5000 + b"0" + b"}" * 5000],
]
OPCODES = [
    *[b"N", b"\x88", b"}", b"]", b")", b"K\x00", b"J\xff\xff\xff\xff", b"G\x7f\xf8" + bytes(6), b"cos\nsystem\n"],
    *[b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"X\x01\x00\x00\x00x", b"0", b"R", b"Q"],
]
json_values: SearchStrategy[Any] = st.sampled_from([*WRONG, *PATHS]) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=6,
)


def spliced(parts: Sequence[Any], new: SearchStrategy[Any]) -> SearchStrategy[list[Any]]:
    """A sequence in which one to three runs of items are replaced by a new item, a repetition, or nothing."""

    def changed(changes: list[tuple[int, int, Any]]) -> list[Any]:
        found = list(parts)
        for start, length, item in changes:
            found[start : start + length] = found[start : start + length] * 2 if item is None else item
        return found

    items = st.none() | st.just([]) | new.map(lambda item: [item])
    lengths = st.sampled_from([0, 1, 1, 4, 20, len(parts)])
    change = st.tuples(st.integers(0, len(parts)), lengths, items)
    return st.lists(change, min_size=1, max_size=3).map(changed)


def edited(raw: bytes) -> SearchStrategy[bytes]:
    """Bytes of which some are replaced, removed or repeated, or to which some are added."""
    characters = [raw[i : i + 1] for i in range(len(raw))]
    return spliced(characters, st.binary(max_size=8) | st.sampled_from(SNIPPETS)).map(b"".join)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found.append((value, key))
        found += places_in(child)
    return found


def copied(value: Any) -> Any:
    """Containers copied, the rest as it is."""
    if isinstance(value, dict):
        return {key: copied(child) for key, child in value.items()}
    return [copied(child) for child in value] if isinstance(value, list) else value


@st.composite
def edited_value(draw: Draw, value: Any, wrong: SearchStrategy[Any] = json_values) -> Any:
    """A value of dicts and lists in which parts are replaced, moved by a number, removed, renamed or wrapped."""
    value = copied(value)
    for _ in range(draw(st.integers(1, 3))):
        places = places_in(value)
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        old = container[key]
        change = draw(st.sampled_from(["replace", "replace", "add", "remove", "rename", "wrap"]))
        if change == "remove":
            del container[key]
        elif change == "rename" and isinstance(container, dict):
            container[draw(st.sampled_from(PATHS) | st.text(max_size=8))] = container.pop(key)
        elif change == "add" and type(old) is int:
            container[key] = old + draw(st.sampled_from([-4, -1, 1, 4, 2**32, -(2**32)]))
        else:
            container[key] = draw(st.sampled_from([[old], {"x": old}])) if change == "wrap" else copied(draw(wrong))
    return value


def json_of(value: Any) -> SearchStrategy[bytes]:
    """JSON of an edited value."""
    return edited_value(value).map(lambda edited: json.dumps(edited).encode())


def json_file(raw: bytes) -> SearchStrategy[bytes]:
    """A file of JSON, edited as bytes or by its values."""
    return st.one_of(edited(raw), json_of(json.loads(raw)), json_of(json.loads(raw)))


# safetensors: the length of the header, the header, the data.


def with_length(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def split(raw: bytes) -> tuple[Json, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def tensor_file(raw: bytes) -> SearchStrategy[bytes]:
    """A safetensors file with an edited header, another length of it, or edited bytes."""
    header, data = split(raw)
    text = json.dumps(header).encode()
    size = len(text)
    lengths = [0, 1, size - 1, size + 1, size + 8, 2**31, 2**32, 2**63, 2**64 - 1, 100_000_001, 10**8]
    headers = json_of(header).map(lambda other: with_length(other, data))
    return st.one_of(edited(raw), st.sampled_from(lengths).map(lambda n: with_length(text, data, n)), headers, headers)


def tensor_values(raw: bytes) -> SearchStrategy[bytes]:
    """A safetensors file with infinite, NaN, tiny, huge or negative numbers in its data."""
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
    words = ["0", "-1", "1e9", "9" * 18, "9" * 19, "١", "3.5", "5", "gram", "diagonal", "log8", "[", '["a"]', *PATHS]

    def changed(key: str, value: str) -> bytes:
        return with_length(json.dumps(header | {"__metadata__": own | {key: value}}).encode(), data)

    keys = st.sampled_from([*own, "kind", "fan_in_fan_out"])
    return st.builds(changed, keys, st.sampled_from(words) | st.text(max_size=20))


# Pickles and archives.


def pickle_of(raw: bytes) -> SearchStrategy[bytes]:
    """A pickle with opcodes removed, repeated or replaced, or with edited bytes; of other bytes, edited ones."""
    try:
        starts = [place for _, _, place in pickletools.genops(raw)]
    except ValueError:
        return edited(raw)
    opcodes = [raw[start:stop] for start, stop in zip(starts, [*starts[1:], len(raw)], strict=True)]
    return spliced(opcodes, st.sampled_from([*OPCODES, *opcodes])).map(b"".join) | edited(raw)


@st.composite
def repacked(draw: Draw, raw: bytes, inner: Callable[[bytes], SearchStrategy[bytes]]) -> bytes:
    """A zip file with one part edited, renamed, lost, twice or compressed."""
    with zipfile.ZipFile(io.BytesIO(raw)) as packed:
        parts = [(info.filename, packed.read(info)) for info in packed.infolist()]
    # Most of what can go wrong is in the part that describes the others.
    telling = [place for place, (name, _) in enumerate(parts) if name.endswith(("data.pkl", ".npy"))]
    place = draw(st.sampled_from([*telling * 2, *range(len(parts))]))
    name, content = parts[place]
    renamed = [(other, content) for other in ("x", "../x", "", "/x", name + "x", parts[0][0])]
    edit = draw(inner(content))
    changes = [[(name, edit)], [(name, edit)], [(name, edit), (name, content)], [], *([one] for one in renamed)]
    parts[place : place + 1] = draw(st.sampled_from(changes))
    method = draw(
        st.sampled_from([zipfile.ZIP_STORED] * 3 + [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    )
    file = io.BytesIO()
    with warnings.catch_warnings(), zipfile.ZipFile(file, "w", method) as packed:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, content in parts:
            packed.writestr(zipfile.ZipInfo(name), content, method)
    return file.getvalue()


def archive(raw: bytes, inner: Callable[[bytes], SearchStrategy[bytes]] = edited) -> SearchStrategy[bytes]:
    return st.one_of(edited(raw), repacked(raw, inner), repacked(raw, inner))


def tensors() -> Sequence[torch.Tensor]:
    """Tensors of types, shapes and values that a checkpoint should not have."""
    return [
        *[torch.zeros(0), torch.tensor(3.0), torch.tensor(float("nan")), torch.tensor(-1), torch.ones(2, 3)],
        *[torch.ones(3, dtype=torch.int8), torch.ones(2, dtype=torch.complex64), torch.ones(4, 4).t()],
        *[torch.ones(1).expand(3, 4), torch.tensor([True]), torch.full((4,), -1.0), torch.full((4, 3), float("inf"))],
        *[torch.eye(3).to_sparse(), torch.empty(3, device="meta"), torch.ones(3, dtype=torch.float16)],
        torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
    ]


def saved(value: Any, zipped: bool = True) -> bytes:
    """The bytes of `torch.save`."""
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def torch_file(value: Any) -> SearchStrategy[bytes]:
    """A file of `torch.save`, as an archive or in the older form: with other values in it, or with edited bytes."""
    wrong = json_values.filter(lambda found: "\\ud" not in json.dumps(found))  # pickles hold no half characters
    values = st.builds(saved, edited_value(value, wrong | st.sampled_from(tensors())), st.booleans())
    return st.one_of(values, archive(saved(value), pickle_of), pickle_of(saved(value, zipped=False)))
