"""Damaged and hostile files: opened, or refused in one sentence; never a crash, a hang, or a look elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import random
import resource
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, open_checkpoint
from gradmerge.checkpoints.model import Buffers
from gradmerge.curvature.files import open_curvature
from gradmerge.curvature.summary import pieces, summarize
from gradmerge.errors import InputError, MachineError
from tests.fuzz.mutate import WRONG, Json, mutate_bytes, mutate_file, mutate_json, with_length
from tests.making import near, random_curvature, random_state, write_model

HEADERS, INDEXES, CURVATURES, ADAPTERS = 1600, 700, 500, 300
#: Far above what any case takes; only there so that a hang ends with a traceback.
PATIENCE = 300
MOST_MEMORY = 50_000_000
#: Of Linux: has it forget the peak of a process.
FORGET = Path("/proc/self/clear_refs")

_opened: list[str] | None = None


def _listen(event: str, arguments: tuple[Any, ...]) -> None:
    if _opened is not None and event in ("open", "os.listdir", "os.scandir"):
        _opened.append(os.fsdecode(arguments[0]) if isinstance(arguments[0], (str, bytes)) else str(arguments[0]))


@pytest.fixture(scope="module", autouse=True)
def _listening() -> None:
    sys.addaudithook(_listen)  # an audit hook stays for the life of the process; it does nothing outside `watched`


@contextlib.contextmanager
def watched() -> Iterator[list[str]]:
    """The paths that are opened inside; a hang ends the process with a traceback."""
    global _opened
    _opened = opened = []
    faulthandler.dump_traceback_later(PATIENCE, exit=True)
    try:
        yield opened
    finally:
        faulthandler.cancel_dump_traceback_later()
        _opened = None


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir())) if Path("/proc/self/fd").is_dir() else 0


class Trial:
    """Runs cases in one folder and holds each to what must be true of all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.outcomes: Counter[str] = Counter()

    def __call__(self, what: str, action: Callable[[], None]) -> bool:
        """Whether the action worked; it may also refuse, and nothing else."""
        before = open_descriptors()
        with watched() as opened:
            try:
                action()
                worked = True
            except (InputError, MachineError) as error:
                worked = False
                message = str(error)
                assert message and len(message) < 5000, f"{what}: a message of {len(message)} characters"
            except BaseException as error:
                raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        root = str(self.folder)
        outside = [
            p for p in opened if not p.isdigit() and not os.path.realpath(p).startswith((root, "/proc/", "/sys/"))
        ]
        outside = [p for p in outside if not p.endswith((".py", ".pyc", ".so")) and "/lib/python" not in p]
        assert not outside, f"{what}: looked outside its folder, at {outside}"
        assert open_descriptors() <= before, f"{what}: left a file open"
        self.outcomes["worked" if worked else "refused"] += 1
        return worked


def peak_memory() -> int:
    """Bytes that the process has held at most since it was last asked to forget."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


@contextlib.contextmanager
def little_memory() -> Iterator[None]:
    """The process grows by no more than a little, not even for a moment; elsewhere than on Linux, Python's memory."""
    if FORGET.exists():  # at no cost, where following all that Python allocates doubles the time
        with contextlib.suppress(AttributeError):  # not of glibc
            ctypes.CDLL(None).malloc_trim(0)  # what is free here would be filled before the process grows
        FORGET.write_text("5")
        held = peak_memory()
        yield
        assert peak_memory() - held < MOST_MEMORY
        return
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def check_reads_stay_inside(checkpoint: Checkpoint, folder: Path) -> None:
    """Whatever opened gives, for every tensor, bytes of a file in its folder."""
    content = {path: path.read_bytes() for path in checkpoint.files()}
    assert all(path.parent.resolve() == folder.resolve() for path in content)
    for name, info in checkpoint.tensors.items():
        if info.numel > 100_000:
            raise AssertionError(f"{name}: more elements than the file has bytes")
        values = checkpoint.read(name, 0, info.numel, Buffers())
        data = values.view(torch.uint8).numpy().tobytes()
        assert len(data) == info.nbytes
        assert any(data in whole for whole in content.values()), f"{name}: bytes that are in no file"


SMALL = {"a.weight": (4, 3), "a.bias": (4,), "b.weight": (2, 4)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder for the cases; beside it, files that none of them may look at."""
    secret = save({"a.weight": torch.full((4, 3), 7.0)})
    for name in ("secret.safetensors", "x", "model.safetensors"):
        (tmp_path / name).write_bytes(secret)
    folder = tmp_path / "inside"
    folder.mkdir()
    return folder


def test_the_watch_notices_a_look_outside_and_a_file_left_open(place: Path) -> None:
    """Else the tests below would pass whatever was opened."""
    trial = Trial(place)
    with pytest.raises(AssertionError, match="looked outside"):
        trial("secret", lambda: open_checkpoint(str(place / ".." / "secret.safetensors")).close())
    write_model(place / "model", random_state(0, SMALL))
    left: list[Checkpoint] = []
    with pytest.raises(AssertionError, match="left a file open"):
        trial("open", lambda: left.append(open_checkpoint(str(place / "model"))))
    left[0].close()
    with pytest.raises(AssertionError), little_memory():
        len(b"x" * (MOST_MEMORY + 5_000_000))  # held for a moment


def test_a_mutated_header_is_read_or_refused_and_nothing_else(place: Path) -> None:
    state = random_state(0, SMALL) | {
        "step": torch.tensor([3]),
        "empty": torch.empty(0, 5),
        "half": torch.ones(3).half(),
    }
    base = write_model(place / "base", state)
    tuned = place / "tuned"
    write_model(tuned, near({n: t for n, t in state.items() if t.is_floating_point()}, 1) | {"step": state["step"]})
    raw = (tuned / "model.safetensors").read_bytes()
    trial, rng = Trial(place), random.Random(1)
    merged = 0

    def merge() -> None:
        recipe = {"method": "task-arithmetic", "base": str(base), "models": [str(tuned)], "exclude": ["*.bias"]}
        gm.merge(recipe, place / "out", threads=1, force=True)

    # What comes with the first merge of a process is not a case's doing.
    merge()
    with little_memory():
        for case in range(HEADERS):
            (tuned / "model.safetensors").write_bytes(mutate_file(raw, rng))

            def opens() -> None:
                with open_checkpoint(str(tuned)) as checkpoint:
                    check_reads_stay_inside(checkpoint, tuned)

            if trial(f"header {case}", opens) or case % 8 == 0:
                merged += trial(f"merge of header {case}", merge)
                assert not (place / "out.gradmerge-partial").exists()
    assert trial.outcomes["worked"] > 20 and trial.outcomes["refused"] > 1000, trial.outcomes
    assert merged > 5


def test_a_mutated_header_of_the_base_is_merged_or_refused_and_nothing_else(place: Path) -> None:
    state = random_state(0, SMALL) | {"step": torch.tensor([3])}
    base, tuned = write_model(place / "base", state), write_model(place / "tuned", state)
    raw = (base / "model.safetensors").read_bytes()
    trial, rng = Trial(place), random.Random(2)
    for case in range(150):
        (base / "model.safetensors").write_bytes(mutate_file(raw, rng))
        # Without the tensors that are merged, so that a strange one is copied.
        recipe = {"method": "average", "base": str(base), "models": [str(tuned)], "include": ["b.weight"]}
        if trial(f"base {case}", lambda recipe=recipe: gm.merge(recipe, place / "out", threads=1, force=True)):  # type: ignore[misc]
            with open_checkpoint(str(place / "out")) as written, open_checkpoint(str(base)) as read:
                assert written.tensors == read.tensors
    assert trial.outcomes["worked"] > 5 and trial.outcomes["refused"] > 50, trial.outcomes


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "BOOL", "U64", "C64"])
def test_a_tensor_of_any_known_type_is_copied_when_it_is_not_merged(place: Path, dtype: str) -> None:
    header = {
        "w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "odd": {"dtype": dtype, "shape": [8 // (8 if dtype in ("U64", "C64") else 1)], "data_offsets": [8, 16]},
    }
    data = bytes(range(16))
    (place / "m.safetensors").write_bytes(with_length(json.dumps(header).encode(), data))
    gm.merge({"method": "average", "models": [str(place / "m.safetensors")], "include": ["w"]}, place / "out")
    with open_checkpoint(str(place / "out")) as result:
        assert result.tensors["odd"].dtype == dtype
        copied = result.read("odd", 0, result.tensors["odd"].numel, Buffers())
        assert copied.view(torch.uint8).numpy().tobytes() == data[8:]


def test_a_mutated_index_is_read_or_refused_and_nothing_else(place: Path) -> None:
    model = write_model(place / "model", random_state(0, SMALL), shards=2)
    index = model / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    raw = index.read_bytes()
    (model / "folder.safetensors").mkdir()
    trial, rng = Trial(place), random.Random(3)

    def opens() -> None:
        with open_checkpoint(str(model)) as checkpoint:
            check_reads_stay_inside(checkpoint, model)

    with little_memory():
        for case in range(INDEXES):
            index.write_bytes(mutate_bytes(raw, rng) if case % 3 == 0 else mutate_json(value, rng))
            trial(f"index {case}", opens)
        for name in [w for w in WRONG if isinstance(w, str)] + [
            "folder.safetensors",
            "../x",
            "../model.safetensors",
            "config.json",
        ]:
            for key in value["weight_map"]:
                changed = {"weight_map": value["weight_map"] | {key: name}}
                index.write_bytes(json.dumps(changed).encode())
                assert not trial(f"index to {name!r}", opens)
    assert trial.outcomes["worked"] > 20 and trial.outcomes["refused"] > 300, trial.outcomes


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "log8"])
def test_a_mutated_curvature_file_is_read_or_refused_and_nothing_else(place: Path, precision: str) -> None:
    random_curvature(0, random_state(0, SMALL)).save(place / "curvature", precision=precision)
    path = place / "curvature" / "curvature.safetensors"
    raw = path.read_bytes()
    trial, rng = Trial(place), random.Random(precision)

    def opens() -> None:
        with open_curvature(str(place / "curvature")) as file:
            for group in summarize(pieces(file)):
                assert group.total >= 0
            assert isinstance(file.transposed, frozenset)

    with little_memory():
        for case in range(CURVATURES // 3):
            path.write_bytes(mutate_file(raw, rng))
            trial(f"{precision} curvature {case}", opens)
    assert trial.outcomes["worked"] > 2 and trial.outcomes["refused"] > 80, trial.outcomes


def test_mutated_curvature_is_merged_or_refused_and_nothing_else(place: Path) -> None:
    state = random_state(0, SMALL)
    base, tuned = write_model(place / "base", state), write_model(place / "tuned", near(state, 1))
    random_curvature(0, state).save(place / "curvature")
    path = place / "curvature" / "curvature.safetensors"
    raw = path.read_bytes()
    trial, rng = Trial(place), random.Random(4)
    recipe = {
        "method": "gradient-matching",
        "base": {"model": str(base), "curvature": {"identity": 1.0}},
        "models": [{"model": str(tuned), "curvature": str(place / "curvature")}],
        "missing": "zero",
    }
    for case in range(120):
        path.write_bytes(mutate_file(raw, rng))
        trial(f"curvature {case}", lambda: gm.merge(recipe, place / "out", threads=1, force=True))  # type: ignore[arg-type,return-value]
        assert not (place / "out.gradmerge-partial").exists()
    assert trial.outcomes["worked"] > 2 and trial.outcomes["refused"] > 50, trial.outcomes


def test_mutated_gram_matrices_are_merged_or_refused_and_nothing_else(place: Path) -> None:
    state = random_state(0, SMALL)
    tuned = write_model(place / "tuned", state)
    header = {
        "__metadata__": {"format": "gradmerge-curvature/1", "examples": "3", "kind": "gram", "fan_in_fan_out": "[]"},
        "a.weight": {"dtype": "F32", "shape": [3, 3], "data_offsets": [0, 36]},
    }
    data = torch.eye(3).numpy().tobytes()
    path = place / "gram.safetensors"
    trial, rng = Trial(place), random.Random(5)
    recipe = {"method": "regmean", "models": [{"model": str(tuned), "curvature": str(path)}]}
    for case in range(120):
        shape = rng.choice([[3, 3], [9], [], [1, 9], [9, 1, 1], [4, 4], [0]])
        header["a.weight"] = {"dtype": "F32", "shape": shape, "data_offsets": [0, 36 if shape != [] else 4]}
        text = json.dumps(header).encode() if case % 2 else mutate_json(header, rng)
        path.write_bytes(with_length(text, data[: 36 if shape != [] else 4]))
        trial(f"Gram matrix {case}, {shape}", lambda: gm.merge(recipe, place / "out", threads=1, force=True))  # type: ignore[arg-type,return-value]
    assert trial.outcomes["worked"] > 2 and trial.outcomes["refused"] > 50, trial.outcomes


def test_a_mutated_adapter_is_read_or_refused_and_nothing_else(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = write_model(place / "base", random_state(0, SMALL))
    adapter = place / "adapter"
    adapter.mkdir()
    monkeypatch.chdir(adapter)
    config = {
        "peft_type": "LORA",
        "r": 2,
        "lora_alpha": 4,
        "alpha_pattern": {"a": 8},
        "rank_pattern": {},
        "use_rslora": False,
        "fan_in_fan_out": False,
        "base_model_name_or_path": "../base",
        "modules_to_save": None,
        "target_modules": ["a"],
    }
    tensors = {
        "base_model.model.a.lora_A.weight": torch.ones(2, 3),
        "base_model.model.a.lora_B.weight": torch.ones(4, 2),
    }
    raw = save(tensors)
    trial, rng = Trial(place), random.Random(6)

    def opens() -> None:
        with open_checkpoint(str(base)) as under:
            given = under if rng.random() < 0.5 else None
            with open_checkpoint(str(adapter), adapter_base=given) as checkpoint:
                for name, info in checkpoint.tensors.items():
                    assert checkpoint.read(name, 0, info.numel, Buffers()).numel() == info.numel

    def written(base_path: Any, case: int) -> bytes:
        if base_path is not None:
            return json.dumps(config | {"base_model_name_or_path": base_path}).encode()
        while True:
            text = mutate_json(config, rng)
            with contextlib.suppress(ValueError, RecursionError):
                # Where a config may send the reader is up to it; the Hub is no place for a test to ask.
                if json.loads(text).get("base_model_name_or_path", "../base") not in ("../base", None):
                    continue
            return text

    for case in range(ADAPTERS):
        (adapter / "adapter_model.safetensors").write_bytes(raw if case % 2 else mutate_file(raw, rng))
        (adapter / "adapter_config.json").write_bytes(written(None, case) if case % 2 else json.dumps(config).encode())
        trial(f"adapter {case}", opens)
    (adapter / "adapter_model.safetensors").write_bytes(raw)
    for strange in (".", "../adapter", "x" * 5000, "~nobody-of-that-name/x", "a\x00b", 5, [], "", {"a": 1}):
        (adapter / "adapter_config.json").write_bytes(written(strange, 0))

        def alone() -> None:
            open_checkpoint(str(adapter)).close()

        assert not trial(f"adapter on {strange!r:.40}", alone)
    assert trial.outcomes["worked"] > 20 and trial.outcomes["refused"] > 100, trial.outcomes


@pytest.mark.parametrize(
    "text",
    [
        "5",
        "[]",
        "null",
        '"x"',
        "{",
        "",
        "{}",
        '{"architectures": {"a": 1}, "vocab_size": []}',
        "\x00",
        '{"architectures": 5, "text_config": 3, "tie_word_embeddings": "no"}',
    ],
)
def test_a_strange_config_is_read_or_refused_and_nothing_else(place: Path, text: str) -> None:
    state = random_state(0, SMALL)
    base = write_model(place / "base", state)
    (base / "config.json").write_text(text)
    recipe = {"method": "average", "base": str(base), "models": [str(base)], "output": {"dtype": "bfloat16"}}
    worked = Trial(place)("config", lambda: gm.merge(recipe, place / "out", threads=1))  # type: ignore[arg-type,return-value]
    assert worked == text.startswith('{"') or text == "{}"
    assert (place / "out").exists() == worked


def test_a_huge_claim_in_a_small_file_costs_nothing(place: Path) -> None:
    big = 2**61
    claims: list[Json] = [
        {"w": {"dtype": "F64", "shape": [big], "data_offsets": [0, big]}},
        {"w": {"dtype": "U8", "shape": [2**40], "data_offsets": [0, 2**40]}},
        {"w": {"dtype": "U8", "shape": [2**31] * 64, "data_offsets": [0, 8]}},
        {"w": {"dtype": "U8", "shape": [0, big], "data_offsets": [0, 0]}},
        {f"w{i}": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]} for i in range(10_000)},
    ]
    trial = Trial(place)
    path = place / "m.safetensors"
    with little_memory():
        for claim in claims:
            path.write_bytes(with_length(json.dumps(claim).encode(), bytes(8)))
            assert not trial(str(claim)[:60], lambda: open_checkpoint(str(path)).close())
        path.write_bytes((10**8).to_bytes(8, "little") + b"{}")
        assert not trial("a header of 100 MB", lambda: open_checkpoint(str(path)).close())


def test_many_names_in_one_file_are_opened_in_little_more_than_the_time_to_read_them(place: Path) -> None:
    """Half a minute, were every name looked for in a list of all."""
    count = 60_000
    header = {f"p{i}.w": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for i in range(count)}
    (place / "one.safetensors").write_bytes(with_length(json.dumps(header).encode(), b""))
    index = {"weight_map": dict.fromkeys(header, "one.safetensors")}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_utime
    with open_checkpoint(str(place)) as checkpoint:
        assert len(checkpoint.tensors) == count
    assert resource.getrusage(resource.RUSAGE_SELF).ru_utime - before < 10
