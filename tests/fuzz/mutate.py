"""Mutations of valid inputs: as bytes, as text, as JSON and YAML, as pickles, and as archives."""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import pickletools
import random
import zipfile
from typing import Any

import torch
import yaml

Json = dict[str, Any]

WRONG: list[Any] = [
    *[None, True, False, -1, -(2**63), 2**31, 2**53, 2**63, 2**64, 10**30, 0.5, 1e308, float("nan"), float("inf")],
    *["", "x", "F32", "\x00", "\ud800", "é" * 300, [], [[]], {}, {"a": 1}, [1, 2, 3], [0], [-1, 0], [0.0, 8.0]],
    *[[True, False], [2**62, 2**62], [2**40] * 8, ["0", "8"], "../secret.safetensors", "/etc/passwd", "..", "."],
    *["a/b", "a\\b", "~", "~root/x", "file:///etc/passwd", "con", "x" * 5000, "model.safetensors\x00"],
    *["%2e%2e/secret.safetensors", "..\u2215secret.safetensors", [1] * 100, [0] * 100],
]
DTYPES = ["F32", "F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "F8_E8M0", "C64", "F4", "f32", "Q8", ""]
#: Bytes that mean something in one of the formats.
SNIPPETS = [
    *[b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\n", b"\r", b"\r\n\r\n", b"\t", b'"', b'""', b"'"],
    *[b",", b",,,,", b":", b": ", b"{", b"}", b"[", b"]", b"[[[[", b"{}", b"NaN", b"Infinity", b"-1", b"1e999"],
    *[b"9" * 400, b"0x10", b"null", b"true", b"~", b"&a [*a]", b"*a", b"<<: *a", b"!!python/object:os.system x"],
    *[b"!!binary x", b"!!set {a}", b"---", b"...", b"%YAML 9.9", b"1:2:3:4:5", b"2001-99-99", b"\x1b[2J"],
    *[b"\xe2\x80\xae", b"<script>", b"=cmd|' /C calc'!A0", b"../", b"/", b"\\ud800", b"\\u0000", b"\x1f\x8b\x08"],
    b"PK\x03\x04",
]


def deep(depth: int, rng: random.Random) -> bytes:
    opening, closing = rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    return opening * depth + b"0" + closing * depth


def mutate_bytes(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    kind = rng.randrange(6) if data else 5
    if kind == 0:
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        place = rng.randrange(len(data))
        data[place:place] = rng.randbytes(rng.choice([1, 2, 100]))
    elif kind == 3:
        place = rng.randrange(len(data))
        del data[place : place + rng.choice([1, 2, 8, 50])]
    elif kind == 4:
        place = rng.randrange(len(data))
        data[place : place + 4] = rng.choice(
            [b"\x00\x00\x00\x00", b"\xff\xfe\xfd\xfc", b'"":{', b"]]]]", b"9999", b"-1e9"]
        )
    else:
        data += rng.randbytes(rng.choice([1, 8, 1000]))
    return bytes(data)


def mutate_text(raw: bytes, rng: random.Random) -> bytes:
    """A text format: hostile snippets, lines moved, doubled or lost, splices, and what `mutate_bytes` does."""
    data = raw
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        kind, place = rng.randrange(7), rng.randrange(len(data) + 1)
        if kind == 0:
            data = data[:place] + rng.choice(SNIPPETS) + data[place:]
        elif kind == 1:
            end = place + rng.choice([1, 4, 20])
            data = data[:place] + rng.choice(SNIPPETS) * rng.choice([1, 1, 50]) + data[end:]
        elif kind == 2:  # a part of it somewhere else
            start = rng.randrange(len(data) + 1)
            data = data[:place] + data[start : start + rng.choice([1, 10, 200])] + data[place:]
        elif kind == 3:
            lines = data.splitlines(keepends=True) or [b""]
            one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
            change = rng.randrange(3)
            if change == 0:
                lines[one], lines[other] = lines[other], lines[one]
            elif change == 1:
                lines.insert(one, lines[other])
            else:
                del lines[one]
            data = b"".join(lines)
        elif kind == 4 and rng.random() < 0.2:
            data = rng.choice([b"", b"\n", b"\x00", b" " * 1000, deep(5000, rng), data * 20])
        else:
            data = mutate_bytes(data, rng)
    return data


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in items:
        found.append((value, key))
        found += places_in(child)
    return found


def mutate_value(value: Any, rng: random.Random, wrong: list[Any] = WRONG) -> None:
    """Change a value of dicts and lists in some places."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        places = places_in(value)
        if not places:
            break
        container, key = rng.choice(places)
        kind = rng.randrange(7)
        if kind == 0:
            container[key] = copy.deepcopy(rng.choice(wrong))  # a later change must not change the list
        elif kind == 1 and isinstance(container[key], int) and not isinstance(container[key], bool):
            container[key] += rng.choice([-4, -1, 1, 4, 2**32, -(2**32)])
        elif kind == 2:
            del container[key]
        elif kind == 3 and isinstance(container, dict):
            container[rng.choice([w for w in WRONG if isinstance(w, str)])] = container.pop(key)
        elif kind == 4 and isinstance(container, dict):
            other = rng.choice(list(container))
            container[key], container[other] = container[other], container[key]
        elif kind == 5 and isinstance(container, dict) and "dtype" in container:
            container["dtype"] = rng.choice(DTYPES)
        else:
            container[key] = [container[key]] if rng.random() < 0.5 else {"x": container[key]}


def mutate_json(value: Any, rng: random.Random) -> bytes:
    value = json.loads(json.dumps(value))
    mutate_value(value, rng)
    text = json.dumps(value)
    extra = rng.randrange(12)
    if extra == 0 and text.startswith("{") and len(value) > 0:  # a key twice
        name = next(iter(value))
        text = text[:-1] + f", {json.dumps(name)}: {json.dumps(value[name])}}}"
    raw = text.encode("utf-8", "surrogatepass")
    if extra == 1:
        raw = raw[:-1] + b', "deep": ' + deep(rng.choice([10, 300, 900, 950, 980, 990, 100_000]), rng) + b"}"
    elif extra == 2:
        raw = (
            raw[:-1]
            + b', "number": '
            + rng.choice([b"9" * 5000, b"-" + b"9" * 4000, b"1e999999", b"NaN", b"0x1"])
            + b"}"
        )
    return raw


def mutate_json_file(raw: bytes, rng: random.Random) -> bytes:
    """A file of JSON: one time in three as text, else by its values."""
    return mutate_text(raw, rng) if rng.random() < 1 / 3 else mutate_json(json.loads(raw), rng)


def mutate_yaml(value: Json, rng: random.Random) -> bytes:
    """A file of YAML: as text, as JSON (which is YAML), or by its values."""
    kind = rng.randrange(3)
    if kind == 0:
        return mutate_text(yaml.safe_dump(value, sort_keys=False).encode(), rng)
    if kind == 1:
        return mutate_json(value, rng)
    value = json.loads(json.dumps(value))
    mutate_value(value, rng)
    style = rng.choice([None, True, False])
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=rng.random() < 0.5, default_flow_style=style).encode(
        "utf-8", "surrogatepass"
    )


# safetensors: the length of the header, the header, the data.


def with_length(header: bytes, data: bytes, rng: random.Random | None = None) -> bytes:
    length = len(header)
    if rng is not None and rng.random() < 0.25:
        length = rng.choice(
            [0, 1, length - 1, length + 1, length + 8, 2**31, 2**32, 2**63, 2**64 - 1, 100_000_001, 10**8]
        )
    return length.to_bytes(8, "little") + header + data


def split(raw: bytes) -> tuple[Json, bytes]:
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def mutate_file(raw: bytes, rng: random.Random) -> bytes:
    header, data = split(raw)
    kind = rng.randrange(4)
    if kind == 0:
        return mutate_bytes(raw, rng)
    if kind == 1:
        return with_length(json.dumps(header).encode(), data, rng)[: rng.choice([None, -1, -4, 8, 7, 0, 20])]  # type: ignore[misc]
    text = mutate_json(header, rng)
    if kind == 3:
        text += b" " * rng.choice([0, 1, 8])
    return with_length(text, data, rng if rng.random() < 0.2 else None)


def mutate_numbers(raw: bytes, rng: random.Random) -> bytes:
    """A safetensors file whose header stays as it is, with strange numbers in its data."""
    header, data = split(raw)
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 3])):
        place = rng.randrange(max(1, len(changed) // 4)) * 4
        word = rng.choice(
            [b"\0\0\x80\x7f", b"\0\0\xc0\x7f", b"\0\0\x80\xff", b"\1\0\0\0", b"\xff\xff\x7f\x7f", b"\0\0\x80\xbf"]
        )
        changed[place : place + 4] = word
    return with_length(json.dumps(header).encode(), bytes(changed[: len(data)]))


# Pickles and archives.


def mutate_pickle(raw: bytes, rng: random.Random) -> bytes:
    """A pickle: its words doubled, dropped, swapped, or with other arguments."""
    with contextlib.suppress(ValueError, IndexError):
        places = [place for _, _, place in pickletools.genops(raw)]
        words = [raw[start:stop] for start, stop in zip(places, [*places[1:], len(raw)], strict=True)]
        for _ in range(rng.choice([1, 1, 2, 4])):
            one, other = rng.randrange(len(words)), rng.randrange(len(words))
            kind = rng.randrange(6)
            if kind == 0:
                del words[one]
            elif kind == 1:
                words[one], words[other] = words[other], words[one]
            elif kind == 2:
                words.insert(one, words[other])
            elif kind == 3:
                words[one] = words[one][:1] + rng.randbytes(max(0, len(words[one]) - 1))
            elif kind == 4:
                words[one] = rng.choice(
                    [
                        *[b"N", b"\x88", b"}", b"]", b")", b"K\x00", b"J\xff\xff\xff\xff"],
                        *[b"G" + b"\x7f\xf8" + bytes(6), b"\x8a\x09" + b"\xff" * 8 + b"\x7f", b"X\x01\x00\x00\x00x"],
                        *[b"cos\nsystem\n", b"0", b"R", b"Q"],
                    ]
                )
            else:
                words[one] = mutate_bytes(words[one], rng)
            if not words:
                break
        return b"".join(words)
    return mutate_bytes(raw, rng)


def mutate_zip(raw: bytes, rng: random.Random, inner: Any = mutate_bytes) -> bytes:
    """An archive: damaged as bytes, or packed again with a part changed, renamed, lost, doubled or compressed."""
    if rng.random() < 0.3:
        return mutate_bytes(raw, rng)
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        parts = [(info.filename, archive.read(info)) for info in archive.infolist()]
    number, kind = rng.randrange(len(parts)), rng.randrange(8)
    # Most of what can go wrong is in what describes the rest.
    telling = [n for n, (name, _) in enumerate(parts) if name.endswith(("data.pkl", ".npy"))]
    if telling and rng.random() < 0.7:
        number = rng.choice(telling)
    name, content = parts[number]
    packing = zipfile.ZIP_STORED
    if kind <= 3:
        parts[number] = name, inner(content, rng)
    elif kind == 4:
        parts[number] = rng.choice(["x", "../x", "", "/x", name + "x", parts[0][0]]), content
    elif kind == 5:
        del parts[number]
    elif kind == 6:
        parts.insert(number, (name, mutate_bytes(content, rng)))
    else:
        packing = rng.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    packed = io.BytesIO()
    import warnings

    with warnings.catch_warnings(), zipfile.ZipFile(packed, "w", packing) as archive:
        warnings.simplefilter("ignore")  # of names that are there twice
        for name, content in parts:
            archive.writestr(zipfile.ZipInfo(name), content, packing)
    return packed.getvalue()


def mutate_torch(value: Any, raw: bytes, rng: random.Random, zipped: bool = True) -> bytes:
    """A file of `torch.save`: ``value`` changed and saved, or its bytes ``raw`` changed."""
    kind = rng.randrange(3)
    if kind == 0:
        return mutate_zip(raw, rng, mutate_pickle) if zipped else mutate_pickle(raw, rng)
    if kind == 1 and not zipped:
        return mutate_bytes(raw, rng)
    value = _copied(value)
    wrong = [w for w in WRONG if w != "\ud800"]  # which pickles cannot hold
    mutate_value(value, rng, [*wrong, *_tensors()])
    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=zipped)
    return file.getvalue()


def _tensors() -> list[torch.Tensor]:
    """Tensors that are not where they should be."""
    return [
        *[torch.zeros(0), torch.tensor(3.0), torch.tensor(float("nan")), torch.tensor(-1), torch.ones(2, 3)],
        *[torch.ones(3, dtype=torch.int8), torch.ones(2, dtype=torch.complex64), torch.ones(4, 4).t()],
        *[torch.ones(1).expand(3, 4), torch.tensor([True]), torch.full((4,), -1.0)],
        *[torch.ones(3, dtype=torch.float16), torch.eye(3).to_sparse(), torch.empty(3, device="meta")],
        *[torch.full((4, 3), float("inf")), torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8)],
    ]


def _copied(value: Any) -> Any:
    """Containers copied, the rest as it is."""
    if isinstance(value, dict):
        return {key: _copied(child) for key, child in value.items()}
    return [_copied(child) for child in value] if isinstance(value, list) else value


def packed(raw: bytes) -> bytes:
    return gzip.compress(raw, mtime=0)
