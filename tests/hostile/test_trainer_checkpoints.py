"""Trainer checkpoints whose files say what cannot be: refused in one sentence, or read without what is unknown."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gradmerge as gm
from gradmerge.curvature.trainer_facts import read_facts
from tests.fuzz.curvature import TrainerCheckpoints

State = dict[str, Any]


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainerCheckpoints:
    made = TrainerCheckpoints(tmp_path / "trainer")
    monkeypatch.chdir(made.place.inputs)
    return made


def first(**changes: Any) -> Callable[[State], None]:
    """Change what is kept for the first parameter."""
    return lambda state: state["state"][0].update(changes)


def group(**changes: Any) -> Callable[[State], None]:
    return lambda state: state["param_groups"][0].update(changes)


STATES: dict[str, tuple[str, Callable[[State], None]]] = {
    "one beta": ("adam", group(betas=(0.9,))),
    "no betas": ("adam", group(betas=[])),
    "a beta that is not a number": ("adam", group(betas=(0.9, float("nan")))),
    "a beta of 1": ("adam", group(betas=(0.9, 1.0))),
    "a beta above 1": ("adam", group(betas=(0.9, 1.5))),
    "betas that are words": ("adam", group(betas="ab")),
    "a decay that is a list": ("adam", group(weight_decay=[], decoupled_weight_decay=False)),
    "moments without numbers": ("adam", first(exp_avg_sq=torch.empty(4, 3, device="meta"))),
    "sparse moments": ("adam", first(exp_avg_sq=torch.ones(4, 3).to_sparse())),
    "complex moments": ("adam", first(exp_avg_sq=torch.ones(4, 3, dtype=torch.complex64))),
    "moments that are a list": ("adam", first(exp_avg_sq=[[1.0] * 3] * 4)),
    "moments of another shape": ("adam", first(exp_avg_sq=torch.ones(2))),
    "moments that are not finite": ("adam", first(exp_avg_sq=torch.full((4, 3), float("inf")))),
    "many steps at once": ("adam", first(step=torch.ones(3))),
    "a step that is a word": ("adam", first(step="many")),
    "a step that is not a number": ("adam", first(step=float("nan"))),
    "a state that is a tensor": ("adam", lambda state: state["state"].update({0: torch.ones(3)})),
    "a state that is a number": ("adam", lambda state: state["state"].update({0: 5})),
    "parameters that are lists": ("adam", group(params=[[0], [1]])),
    "a parameter twice": ("named", group(param_names=["a.bias"] * 6, params=[1] * 6)),
    "names that are numbers": ("named", group(param_names=[1, 2, 3, 4, 5, 6])),
    "no groups": ("adam", lambda state: state.update(param_groups=[])),
    "an infinite ess": ("ivon", group(ess=float("inf"))),
    "an ess that is not a number": ("ivon", group(ess=float("nan"))),
    "an ess beyond all data": ("ivon", group(ess=1e300)),
    "an ess that is a list": ("ivon", group(ess=[1])),
    "a Hessian without numbers": ("ivon", group(hess=torch.empty(34, device="meta"))),
    "a Hessian that is too short": ("ivon", group(hess=torch.ones(3))),
    "a Hessian of negative numbers": ("ivon", group(hess=-torch.ones(34))),
}


@pytest.mark.parametrize("case", STATES)
def test_an_optimizer_that_cannot_be_is_refused(checkpoint: TrainerCheckpoints, case: str) -> None:
    kind, spoil = STATES[case]
    state = checkpoint.states[kind]
    spoil(state)
    torch.save(state, "optimizer.pt")
    with pytest.raises(gm.InputError) as refusal:
        gm.import_curvature(".", model=checkpoint.model).save(checkpoint.place.out)
    assert len(str(refusal.value)) < 2000
    assert not any(checkpoint.place.out.parent.iterdir())


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["adam", "named", "ivon"])
def test_the_same_optimizers_unspoiled_are_read(checkpoint: TrainerCheckpoints, kind: str) -> None:
    """Else the refusals above might have any reason."""
    torch.save(checkpoint.states[kind], "optimizer.pt")
    gm.import_curvature(".", model=checkpoint.model).save(checkpoint.place.out)
    assert gm.Curvature.load(checkpoint.place.out).examples == {"ivon": 100}.get(kind, 24)


NUMBERS = [10**400, 2**64, 10**16, -1, 0, True, 1e400, float("nan"), 5e-324, 1e308, "6", None, [6], {"a": 6}]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("number", NUMBERS, ids=lambda n: repr(n)[:12])
@pytest.mark.parametrize("key", ["global_step", "epoch", "train_batch_size", "num_train_epochs", "grad_norm"])
def test_a_count_that_cannot_be_is_taken_as_unknown(checkpoint: TrainerCheckpoints, key: str, number: Any) -> None:
    path = Path("trainer_state.json")
    state = json.loads(path.read_text())
    if key == "grad_norm":
        state["log_history"].append({"grad_norm": number})
    else:
        state[key] = number
    path.write_text(json.dumps(state))
    message, examples = "", None
    try:
        found = gm.import_curvature(".", model=checkpoint.model)
        found.save(checkpoint.place.out)
        examples = gm.Curvature.load(checkpoint.place.out).examples
    except gm.InputError as error:
        message = str(error)
    assert examples in (24, 96) or "--examples" in message or "--batch-size" in message
    assert gm.import_curvature(".", 10, 2, model=checkpoint.model).examples == 10


@pytest.mark.parametrize("number", [10**400, 10**16, 0, -1])
def test_a_count_that_is_given_and_cannot_be_is_refused(checkpoint: TrainerCheckpoints, number: int) -> None:
    for counts in ({"examples": number, "batch_size": 2}, {"examples": 10, "batch_size": number}):
        with pytest.raises(gm.InputError, match=r"at most|at least|examples in steps of"):
            gm.import_curvature(".", model=checkpoint.model, **counts)


PICKLES = {
    "cut after a length": b"\x80\x02X\xff\xff\xff\x7fx",
    "a length below nothing": b"\x80\x02T\xff\xff\xff\xff",
    "no end": b"\x80\x02}",
    "nothing": b"",
    "an unknown word": b"\x80\x02\xff.",
    "a number that is none": b"I1x\n.",
    "a long that is too long": b"\x80\x02\x8b\xff\xff\xff\x7f.",
    "text that is not UTF-8": b"\x80\x02X\x02\x00\x00\x00\xff\xfe.",
    "a bad escape": b"S'\\x'\n.",
}


@pytest.mark.parametrize("case", PICKLES)
def test_training_arguments_that_are_no_pickle_tell_nothing(checkpoint: TrainerCheckpoints, case: str) -> None:
    with zipfile.ZipFile("training_args.bin", "w") as archive:
        archive.writestr("training_args/data.pkl", PICKLES[case])
    assert read_facts(Path()).accumulated is None


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_training_arguments_in_a_damaged_archive_tell_nothing(checkpoint: TrainerCheckpoints, method: int) -> None:
    with zipfile.ZipFile("training_args.bin", "w", method) as archive:
        archive.writestr("training_args/data.pkl", b"\x80\x02}." * 50)
    raw = bytearray(Path("training_args.bin").read_bytes())
    for place in range(0, len(raw), 7):
        changed = bytearray(raw)
        changed[place : place + 3] = b"\xff\x00\xff"
        Path("training_args.bin").write_bytes(changed)
        assert read_facts(Path()).accumulated is None
