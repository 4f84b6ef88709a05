"""A client answers a few questions, within its owner's limits, and says nothing of its data when it fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from gradmerge.errors import InputError, MachineError
from gradmerge.federated import client_app
from gradmerge.federated.answerer import Answerer
from gradmerge.federated.flower_parts import answer_until_the_end
from gradmerge.federated.hosting import write_app
from gradmerge.federated.settings import ClientSettings, ServerSettings, defaults_of_server
from gradmerge.federated.wire import digest, packed, unpacked, weights

from .making import client_settings, write_place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_place(tmp_path_factory.mktemp("answering"))


@pytest.fixture(scope="module")
def answerer(place: Path) -> Iterator[Answerer]:
    with Answerer(client_settings(place, "a")) as one:
        yield one


def ask(answerer: Answerer, kind: str, told: int = 0, **more: Any) -> dict[str, Any]:
    state = weights(answerer._model)
    facts = {"mark": "0", "model": digest(state)} | {k: v for k, v in more.items() if k not in ("state", "groups")}
    groups = {"state": more.get("state", state), **more.get("groups", {})}
    return answerer.answer(kind, facts, groups, told)[0]


def changed(answerer: Answerer, name: str, value: torch.Tensor | None) -> dict[str, torch.Tensor]:
    state = weights(answerer._model)
    return {k: v for k, v in {**state, name: value}.items() if v is not None}


NAME = "classifier.weight"


def test_questions_that_do_not_fit_are_refused(answerer: Answerer) -> None:
    state = weights(answerer._model)
    many = {f"direction{k}": state for k in range(17)}
    nan = state[NAME].clone().fill_(float("nan"))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"state": changed(answerer, "more", torch.zeros(1))}, "other names"),
        ({"state": changed(answerer, NAME, None)}, "other names"),
        ({"state": changed(answerer, NAME, torch.zeros(3))}, "other shapes"),
        ({"state": changed(answerer, NAME, state[NAME].double())}, "other shapes or types"),
        ({"state": changed(answerer, NAME, nan)}, "not finite"),
        ({"state": changed(answerer, NAME, state[NAME] + 1)}, "other weights than it names"),
        ({"mark": 1}, "no mark"),
        ({"directions": 17, "groups": many}, "too many directions"),
        ({"directions": -1}, "too many directions"),
        ({"directions": "2"}, "too many directions"),
        ({"directions": 1, "groups": {"direction0": {NAME: state[NAME]}}}, "other names"),
        ({"groups": {"points": {"points": torch.zeros(65, 0)}}}, "too many"),
        ({"groups": {"points": {"points": torch.zeros(2, 3)}}}, "not in the span"),
    ]
    before = digest(state)
    for more, words in wrong:
        assert words in ask(answerer, "losses", **more)["refused"], more
    for kind in ("curvature", "exec", "__init__", "read ../a.jsonl"):
        assert ask(answerer, kind)["refused"] == "it does not answer that kind of question"
    assert ask(answerer, "points")["refused"] == "the question has no points"
    assert digest(weights(answerer._model)) == before
    assert "refused" not in ask(answerer, "losses")


def test_a_client_keeps_to_its_owners_limits(place: Path) -> None:
    with Answerer(client_settings(place, "a", most_gradients=2)) as one:
        assert "refused" not in ask(one, "gradient", told=1)
        assert "as many gradients as its owner allows" in ask(one, "gradient", told=2)["refused"]
        assert "refused" not in ask(one, "losses", told=2)
    with Answerer(client_settings(place, "a", least_rows=37)) as one:
        for kind in ("hello", "losses", "gradient"):
            assert "fewer rows than its owner allows" in ask(one, kind)["refused"]


def test_gradients_are_counted_over_messages_of_a_run(answerer: Answerer) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    context = Context(1, 1, {}, RecordDict(), {})
    state = weights(answerer._model)
    message = Message(packed({"mark": "0", "model": digest(state)}, {"state": state}), 1, "query.gradient")
    message.metadata.__dict__["_message_id"] = "1"
    for count in (1, 2):
        client_app.respond("gradient", message, context, lambda: answerer)
        assert context.state[client_app.COUNTS]["gradients"] == count


def test_a_server_with_many_runs_kinds_or_bytes_gets_nothing_more(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a connection of Flower's that has the messages of a hostile server."""
    waiting: list[Message] = []
    replies: list[Message] = []

    @contextlib.contextmanager
    def connected(*_: Any) -> Iterator[Any]:
        def receive() -> Any:
            return (waiting[0], get_object_tree(waiting[0]))

        def send(reply: Message, *_: Any) -> tuple[set[str], str]:
            waiting.pop(0)
            replies.append(reply)
            return set(), ""

        def pull(run: int, name: str) -> bytes:
            return get_all_nested_objects(waiting[0])[name].deflate()

        yield 1, receive, send, None, None, pull, None, lambda run, name: None

    monkeypatch.setattr("flwr.supernode.fleet_http_connection.http_request_response", connected)
    settings = client_settings(place, "a", most_gradients=1)
    with Answerer(settings) as one:
        state = weights(one._model)
        asked = packed({"mark": "0", "model": digest(state)}, {"state": state})
        for run, kind in enumerate(("gradient", "gradient", "exec", "end")):
            TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, 1, 1
            waiting.append(Message(asked, 1, f"query.{kind}"))
            waiting[-1].metadata.__dict__["_message_id"] = waiting[-1].object_id
        more: dict[str, Any] = {"certificates": None, "keys": None, "insecure": True, "wait": 1.0}
        more |= {"joined": lambda: None, "most": 1_000_000}
        last = waiting[-1]
        answer = client_app.make_app(lambda context: one)
        assert answer_until_the_end("localhost:1", answer, **more) == 4
        first, second, other = (reply for reply in replies[:3])
        assert "refused" not in unpacked(first.content)[0]
        assert "as many gradients" in unpacked(second.content)[0]["refused"]
        assert other.has_error() and "kind of question" in other.error.reason
        waiting.append(last)
        with pytest.raises(MachineError, match="more than a model of this size needs"):
            answer_until_the_end("localhost:1", answer, **more | {"most": 1000})


def test_what_goes_wrong_on_a_client_stays_there(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], answerer: Answerer, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "patients.jsonl"
    secret.write_text('{"text": "Jane Doe", "label": 7}\n')
    config = {"model": str(place / "merged"), "name": "a", "data": str(secret), "device": "cpu"}
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
    message = Message(packed({"mark": "0"}), 1, "query.hello")
    message.metadata.__dict__["_message_id"] = "1"
    reply = client_app.app(message, Context(1, 1, config, RecordDict(), {}))
    told = str(unpacked(reply.content))
    assert "its own log says how" in told
    assert "patients" not in told and "Jane" not in told and str(tmp_path) not in told
    assert "patients.jsonl" in capsys.readouterr().out

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("Jane Doe has label 7")

    # Flower tells the server the words of whatever an app raises.
    told = str(unpacked(client_app.respond("hello", message, Context(1, 1, {}, RecordDict(), {}), fails).content))
    assert "its own log says how" in told and "Jane" not in told

    monkeypatch.setattr(answerer._owner, "losses", fails)
    assert ask(answerer, "losses") == {"refused": "it could not compute the answer; its own log says why"}


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"data": "x", "name": "a"}, "model is missing"),
        ({"model": "m", "name": "a"}, "data is missing"),
        ({"model": "m", "data": "x"}, "name is missing"),
        ({"model": "m", "data": "x", "name": "../a"}, "give up to 64 letters"),
        ({"model": "m", "data": "x", "name": "a", "nois": 4}, "did you mean 'noise'"),
        ({"model": "m", "data": "x", "name": "a", "noise": "4"}, "give a number"),
        ({"model": "m", "data": "x", "name": "a", "noise": 4}, "give the budget too"),
        ({"model": "m", "data": "x", "name": "a", "epsilon": 4.0}, "give noise too"),
        ({"model": "m", "data": "x", "name": "a", "noise": -1.0}, "not negative"),
        ({"model": "m", "data": "x", "name": "a", "noise": 1, "epsilon": 1, "ledger": "l", "clip": 0}, "above 0"),
        ({"model": "m", "data": "x", "name": "a", "noise": 1, "epsilon": 1, "ledger": "l", "delta": 1}, "between 0"),
        ({"model": "m", "data": "x", "name": "a", "noise": 1, "epsilon": 1, "ledger": "/no/l"}, "its folder is not"),
    ],
)
def test_settings_of_a_client_that_are_wrong_are_said(told: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ClientSettings.read(told)


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"out": "o"}, "model is missing"),
        ({"model": "m"}, "out is missing"),
        ({"model": "m", "out": "o", "clients": True}, "whole number"),
        ({"model": "m", "out": "o", "clients": 0}, "at least one"),
        ({"model": "m", "out": "o", "on-failure": "go"}, "known are stop and continue"),
        ({"model": "m", "out": "o", "timeout": 0}, "number of seconds"),
        ({"model": "m", "out": "o", "round": 3}, "did you mean 'rounds'"),
    ],
)
def test_settings_of_a_server_that_are_wrong_are_said(told: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        ServerSettings.read(told)


def test_the_app_for_flower_declares_every_setting(tmp_path: Path) -> None:
    import tomllib

    write_app(tmp_path, defaults_of_server())
    told = tomllib.loads((tmp_path / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert told["components"]["clientapp"] == "gradmerge.federated.client_app:app"
    read = ServerSettings.read({**told["config"], "model": "m", "out": "o"})
    assert read == ServerSettings(model="m", out="o")
