"""The client as an app of Flower's: `clientapp = "gradmerge.federated.client_app:app"`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from .answerer import Answerer
from .settings import ClientSettings
from .wire import Malformed, packed, unpacked

QUESTIONS = ("hello", "losses", "points", "gradient", "along", "score", "end")
COUNTS = "gradmerge"

_opened: dict[str, Answerer] = {}


def answerer_of(node_config: Mapping[str, Any]) -> Answerer:
    """Loaded once in a process, which may answer many questions."""
    key = json.dumps(dict(node_config), sort_keys=True)
    if key not in _opened:
        _opened[key] = Answerer(ClientSettings.read(node_config), lambda text: print(text, flush=True))
    return _opened[key]


def respond(kind: str, message: Message, context: Context, answerer: Callable[[], Answerer]) -> Message:
    """The reply to a message; ``context`` remembers how many gradients were told."""
    if kind == "end":
        return Message(packed({"mark": unpacked(message.content)[0].get("mark", "")}), reply_to=message)
    counts = context.state.config_records.get(COUNTS)
    told = counts.get("gradients", 0) if counts is not None else 0
    try:
        facts, groups = answerer().answer(kind, *unpacked(message.content), told=int(told))  # type: ignore[arg-type]
    except Malformed as error:
        facts, groups = {"refused": f"the question {error}"}, {}
    except Exception as error:  # of the settings, the model or the data; Flower would tell its words to the server
        print(f"error: {error}", flush=True)
        facts, groups = {"refused": "its own settings, model or data are wrong; its own log says how"}, {}
    if kind == "gradient" and "refused" not in facts:
        context.state[COUNTS] = ConfigRecord({"gradients": int(told) + 1})  # type: ignore[arg-type]
    return Message(packed(facts, groups), reply_to=message)


def make_app(answerer: Callable[[Context], Answerer]) -> ClientApp:
    """An app that answers the questions of a refinement, and no others."""
    made = ClientApp()

    def register(kind: str) -> None:
        @made.query(kind)
        def _(message: Message, context: Context) -> Message:
            return respond(kind, message, context, lambda: answerer(context))

    for kind in QUESTIONS:
        register(kind)
    return made


app = make_app(lambda context: answerer_of(context.node_config))
