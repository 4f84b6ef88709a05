"""A merge, rows of two owners, and a stand-in for Flower's network in this process."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from safetensors.torch import load_file, save_file

from gradmerge.curvature.losses import logits_of
from gradmerge.federated.answerer import Answerer
from gradmerge.federated.client_app import make_app
from gradmerge.federated.settings import ClientSettings, ServerSettings
from gradmerge.federated.wire import digest, packed, unpacked
from gradmerge.tasks import load_task
from gradmerge.tasks.loading import DEFAULTS

from ..tasks.making import sentences, tiny_bert_checkpoint, write_jsonl

ROWS = 40
OPTIONS = {"batch_size": ROWS, "device": "cpu"}


def write_place(folder: Path) -> Path:
    """A model near the one that gave the labels of a.jsonl and b.jsonl."""
    tiny_bert_checkpoint(folder / "merged", num_hidden_layers=1)
    weights = load_file(folder / "merged" / "model.safetensors")
    for seed, name in enumerate(("a", "b")):
        texts = sentences(ROWS, seed)
        write_jsonl(folder / f"{name}.jsonl", [{"text": text, "label": 0} for text in texts])
        loaded = load_task(folder / "merged", folder / f"{name}.jsonl", device="cpu")
        with torch.no_grad():
            logits = torch.cat([logits_of(loaded.model, batch) for batch in loaded.batches(ROWS)])
        side = logits[:, 1] - logits[:, 0]
        labels = (side > side.median()).int().tolist()
        write_jsonl(folder / f"{name}.jsonl", [{"text": t, "label": y} for t, y in zip(texts, labels, strict=True)])
    torch.manual_seed(0)
    near = {name: value + 0.02 * torch.randn_like(value) for name, value in weights.items()}
    near["classifier.weight"] *= 4 / near["classifier.weight"].norm()
    save_file(near, folder / "merged" / "model.safetensors", {"format": "pt"})
    return folder


def client_settings(place: Path, name: str, **more: Any) -> ClientSettings:
    loading = DEFAULTS | OPTIONS
    told = {"model": str(place / "merged"), "name": name, "data": str(place / f"{name}.jsonl"), "loading": loading}
    return ClientSettings(**told | more)


def server_settings(place: Path, out: Path, **more: Any) -> ServerSettings:
    told = {
        "model": str(place / "merged"),
        "out": str(out),
        "rounds": 1,
        "timeout": 60.0,
        "loading": DEFAULTS | OPTIONS,
    }
    return ServerSettings(**told | more)


Reply = Callable[[Message], Message | None]


def replies_of(answerer: Answerer) -> Reply:
    """A client's replies, by the app that ships; what was asked before is not computed again."""
    app, context = make_app(lambda context: answerer), Context(1, 1, {}, RecordDict(), {})
    known: dict[str, Any] = {}

    def reply(message: Message) -> Message:
        facts, groups = unpacked(message.content)
        mark = facts.pop("mark")
        key = f"{message.metadata.message_type} {facts} {digest(*groups.values())}"
        if key not in known:
            known[key] = unpacked(app(message, context).content)
        told, tensors = known[key]
        return Message(packed({**told, "mark": mark}, tensors), reply_to=message)

    return reply


class GridHere:
    """Flower's grid with clients in this process: None for an answer is one that never comes."""

    def __init__(self, *clients: Reply) -> None:
        self._clients = dict(enumerate(clients, 1))
        self._ids = itertools.count()
        self._replies: dict[str, Message] = {}
        self.asked: list[str] = []
        # As where Flower runs a server app.
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

    def get_node_ids(self) -> list[int]:
        return list(self._clients)

    def push_messages(self, messages: list[Message]) -> list[str]:
        sent = []
        for message in messages:
            name = f"message {next(self._ids)}"
            message.metadata.__dict__["_message_id"] = name
            self.asked.append(message.metadata.message_type)
            reply = self._clients[message.metadata.dst_node_id](message)
            if reply is not None:
                self._replies[name] = reply
            sent.append(name)
        return sent

    def pull_messages(self, names: list[str]) -> list[Message]:
        return [self._replies.pop(name) for name in names if name in self._replies]
