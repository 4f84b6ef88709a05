"""Refinement with clients: the same bytes as with the data at hand, and clients that fail, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message
from torch import nn

import gradmerge as gm
from gradmerge.errors import MachineError
from gradmerge.federated.answerer import Answerer
from gradmerge.federated.client_app import QUESTIONS
from gradmerge.federated.remote_owner import ClientLost, Federation
from gradmerge.federated.running import refine_with_clients
from gradmerge.federated.wire import packed, unpacked
from gradmerge.refinement.saving import opened_start
from gradmerge.tasks.loading import DEFAULTS

from .making import OPTIONS, GridHere, Reply, client_settings, replies_of, server_settings, write_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("federated"))


@pytest.fixture(scope="module")
def clients(place: Path) -> dict[str, Reply]:
    return {name: replies_of(Answerer(client_settings(place, name))) for name in ("a", "b")}


@pytest.fixture(scope="module")
def at_hand(place: Path) -> dict[tuple[str, ...], bytes]:
    """What `gm.refine` makes of the same rows, of both tasks and of the first alone."""
    found: dict[tuple[str, ...], bytes] = {}
    for names in (("a", "b"), ("a",)):
        out = place / "-".join(("refined", *names))
        data = {name: place / f"{name}.jsonl" for name in names}
        gm.refine(place / "merged", data, out=out, rounds=1, progress=False, **OPTIONS)
        found[names] = weights(out)
    return found


def test_the_result_is_that_of_refine_byte_by_byte_and_names_the_clients_not_their_data(
    place: Path, clients: dict[str, Reply], at_hand: dict, tmp_path: Path
) -> None:
    grid = GridHere(clients["b"], clients["a"])
    done = refine_with_clients(grid, server_settings(place, tmp_path / "out"))
    assert done["improved"]
    assert weights(tmp_path / "out") == at_hand["a", "b"]
    assert weights(tmp_path / "out") != weights(place / "merged")
    assert set(grid.asked) == {f"query.{kind}" for kind in QUESTIONS}
    record = json.loads((tmp_path / "out" / "gradmerge.json").read_text())
    assert set(record["refinement"]["tasks"]) == {"a", "b"} and not record["refinement"]["lost"]
    for path in ("gradmerge.json", "README.md", "report.html"):
        assert "jsonl" not in (tmp_path / "out" / path).read_text()


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def changed(
    change: Callable[[dict[str, Any], dict[str, Any]], Any], kind: str = "gradient"
) -> Callable[[Reply], Reply]:
    """A client that answers one kind of question otherwise than it should."""

    def wrap(reply: Reply) -> Reply:
        def answer(message: Message) -> Message | None:
            said = reply(message)
            if message.metadata.message_type != f"query.{kind}" or said is None:
                return said
            facts, groups = unpacked(said.content)
            made = change(facts, groups)
            if made is None:
                return None
            return Message(packed(facts, groups) if made is True else made, reply_to=message)

        return answer

    return wrap


def put(group: str, name: str | None, value: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Any], bool]:
    def change(facts: dict[str, Any], groups: dict[str, Any]) -> bool:
        key = name or next(iter(groups[group]))
        groups[group][key] = value(groups[group][key])
        return True

    return change


def lone(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """The tensor with another first entry."""
    return lambda tensor: tensor.clone().index_fill_(0, torch.tensor([0]), value)


def facts_with(**more: Any) -> Callable[[Any, Any], bool]:
    return lambda facts, groups: facts.update(more) or True


def renamed(facts: dict[str, Any], groups: dict[str, Any]) -> bool:
    groups["gradient"]["__init__"] = groups["gradient"].pop("classifier.bias")
    return True


def pickled(facts: dict[str, Any], groups: dict[str, Any]) -> Any:
    content = packed(facts, {})
    content["tensors"] = ArrayRecord({"tensors": Array("object", (1,), "numpy.ndarray", b"\x80\x04cos\nsystem\n.")})
    return content


def torn(facts: dict[str, Any], groups: dict[str, Any]) -> Any:
    content = packed(facts, {})
    content["tensors"] = ArrayRecord({"tensors": Array("uint8", (9,), "safetensors", b"\xff" * 9)})
    return content


def older(facts: dict[str, Any], groups: dict[str, Any]) -> Any:
    content = packed(facts, groups)
    content.config_records["facts"]["schema"] = "gradmerge-federated/0"
    return content


def other_records(facts: dict[str, Any], groups: dict[str, Any]) -> Any:
    content = packed(facts, groups)
    content["../../etc/passwd"] = ConfigRecord({"x": 1})
    return content


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(1_000_000, dtype=tensor.dtype)


WEIGHT = "classifier.weight"
#: What a client does wrong, and the words for it.
WRONG = {
    "NaN in a gradient": (
        changed(put("gradient", WEIGHT, lone(float("nan")))),
        "classifier.weight has values that are",
    ),
    "infinite curvature": (changed(put("curvature", f"{WEIGHT}.A", lone(float("inf")))), "not finite"),
    "another shape": (changed(put("gradient", WEIGHT, lambda t: t.T.contiguous())), "another shape or type"),
    "an absurd size": (changed(put("gradient", WEIGHT, longer)), "another shape or type"),
    "another type": (changed(put("gradient", WEIGHT, lambda t: t.double())), "another shape or type"),
    "an unknown name": (changed(renamed), "not of the parameters of this model"),
    "no symmetry": (
        changed(put("curvature", f"{WEIGHT}.G", lambda t: t + torch.tensor([[0, 1], [0, 0]]))),
        "symmetric",
    ),
    "negative factors": (changed(put("curvature", f"{WEIGHT}.A", lambda t: -t)), "negative along"),
    "indefinite factors": (
        changed(put("curvature", f"{WEIGHT}.G", lambda t: torch.tensor([[1.0, 5.0], [5.0, 1.0]]))),
        "negative along",
    ),
    "a negative diagonal": (
        changed(put("curvature", "bert.embeddings.LayerNorm.weight", lambda t: -t - 1)),
        "negative entries",
    ),
    "factors of another layer": (changed(put("curvature", f"{WEIGHT}.A", lambda t: torch.eye(3))), "another size"),
    "missing curvature": (changed(lambda f, g: g["curvature"].pop(f"{WEIGHT}.A") is not None), "lacks a factor"),
    "curvature of more rows than there are": (changed(facts_with(curvature_rows=10**6)), "1000000 rows"),
    "tokens that are none": (changed(lambda f, g: facts_with(tokens=[-1] * len(f["factors"]))(f, g)), "tokens"),
    "the gradient of another model": (changed(facts_with(model="0" * 64)), "another model"),
    "an answer to another question": (changed(facts_with(mark="0" * 16)), "another question"),
    "a refusal": (changed(facts_with(refused="no\x1b[2J\nthanks")), r"refuses: no\x1b[2J\nthanks"),
    "another version": (changed(older), "is not of the form gradmerge-federated/1"),
    "a pickle": (changed(pickled), "another form than safetensors"),
    "torn bytes": (changed(torn), "cannot be read"),
    "a record of its own": (changed(other_records), "records that it should not"),
    "no answer": (changed(lambda f, g: None), "did not answer within 0.2 s"),
    "a loss that is no number": (changed(facts_with(row_losses=float("nan")), "losses"), "not a finite number"),
    "too few losses": (changed(facts_with(losses=[1.0]), "points"), "losses"),
    "a matrix of another size": (changed(put("along", "matrix", lambda t: t[:0, :0]), "along"), "not a matrix of"),
    "a matrix that is no curvature": (changed(put("along", "matrix", lambda t: -t), "along"), "negative along"),
    "a score that is no number": (changed(facts_with(score=float("nan")), "score"), "score is not a number"),
    "a name with a path": (changed(facts_with(name="../b"), "hello"), "its name"),
    "the name of another": (changed(facts_with(name="a"), "hello"), "same name"),
    "another model": (changed(facts_with(structure="0" * 64), "hello"), "its model is another one"),
    "no rows": (changed(facts_with(rows=0), "hello"), "rows is less than 1"),
    "rows as text": (changed(facts_with(held="many"), "hello"), "held is not a finite number"),
}


@pytest.fixture(scope="module")
def model(place: Path) -> Iterator[nn.Module]:
    with opened_start(str(place / "merged"), DEFAULTS | OPTIONS) as start:
        yield start.model


@pytest.mark.parametrize("what", WRONG)
def test_a_client_that_answers_wrong_is_refused_and_named(
    model: nn.Module, clients: dict[str, Reply], what: str
) -> None:
    wrap, words = WRONG[what]
    federation = Federation(GridHere(clients["a"], wrap(clients["b"])), model, timeout=0.2)
    (owner, *_), failures = federation.gather(2, 1.0)
    if not failures:
        along = [{name: torch.ones_like(p, requires_grad=False) for name, p in model.named_parameters()}]

        def ask() -> None:
            owner.losses(model, held=False)
            owner.label_score(model, held=False)
            owner.gradient(model)
            owner.along(model, along)
            owner.losses(model, along, torch.tensor([[0.0], [1e-3]], dtype=torch.float64), held=True)

        with pytest.raises(ClientLost) as lost:
            ask()
        failures = lost.value.failures
    ((name, why),) = failures.items()
    assert name == {"a name with a path": "../b", "the name of another": "a"}.get(what, "b") and words in why


@pytest.mark.parametrize("what", ["NaN in a gradient", "a name with a path"])
def test_with_a_client_that_answers_wrong_nothing_is_written(
    place: Path, clients: dict[str, Reply], tmp_path: Path, what: str
) -> None:
    grid = GridHere(clients["a"], WRONG[what][0](clients["b"]))
    with pytest.raises(MachineError, match=r"client .*b: .*on-failure continue"):
        refine_with_clients(grid, server_settings(place, tmp_path / "out"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["hello", "gradient", "points"])
def test_the_others_go_on_without_a_client_that_drops_out(
    place: Path, clients: dict[str, Reply], at_hand: dict, tmp_path: Path, kind: str
) -> None:
    said: list[str] = []
    grid = GridHere(clients["a"], changed(facts_with(refused="no"), kind)(clients["b"]))
    settings = server_settings(place, tmp_path / "out", on_failure="continue")
    done = refine_with_clients(grid, settings, said.append)
    assert weights(tmp_path / "out") == at_hand[("a",)]
    assert list(done["lost"]) == ["(node 2)" if kind == "hello" else "b"] and set(done["tasks"]) == {"a"}
    assert any("left out: it refuses: no" in text for text in said)
    assert any("was left out" in text for text in done["notes"])


def test_a_client_that_leaves_after_a_step_leaves_a_model_that_is_no_worse_for_the_others(
    place: Path, clients: dict[str, Reply], tmp_path: Path
) -> None:
    told = 0

    def leaves(message: Message) -> Message | None:
        nonlocal told
        told += message.metadata.message_type == "query.gradient"
        return clients["b"](message) if told < 2 else changed(facts_with(refused="no"))(clients["b"])(message)

    done = refine_with_clients(
        GridHere(clients["a"], leaves), server_settings(place, tmp_path / "out", on_failure="continue", rounds=2)
    )
    assert told >= 2 and done["improved"] and set(done["rounds"][-1]["held"]) == {"a"}
    assert done["rounds"][-1]["held"]["a"] < done["rounds"][0]["held"]["a"] and set(done["lost"]) == {"b"}


def test_fewer_clients_than_the_minimum_end_it(place: Path, clients: dict[str, Reply], tmp_path: Path) -> None:
    grid = GridHere(clients["a"], changed(facts_with(refused="no"))(clients["b"]))
    settings = server_settings(place, tmp_path / "out", on_failure="continue", minimum=2)
    with pytest.raises(MachineError, match=r"1 clients are left, where at least 2.*client b: it refuses: no"):
        refine_with_clients(grid, settings)
    assert not list(tmp_path.iterdir())


def test_clients_that_do_not_come_end_it(place: Path, tmp_path: Path) -> None:
    with pytest.raises(MachineError, match=r"0 of 2 clients came within 0.1 s"):
        refine_with_clients(GridHere(), server_settings(place, tmp_path / "out", wait=0.1))
    assert not list(tmp_path.iterdir())
