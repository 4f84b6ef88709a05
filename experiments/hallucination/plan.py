"""What a run would fetch and train."""

from __future__ import annotations

from pathlib import Path

from ..common.plan import Data, Model, Plan, Step
from ..common.removal import FOLLOWED, steps
from .settings import Settings


def plan(settings: Settings, data_dir: Path) -> Plan:
    models = [Model(settings.model, "the dialogue model before its training")] if settings.model else []
    models += [Model(settings.critic, "says whether a response is faithful")] if settings.critic else []
    columns = ("knowledge", "history", "response")
    data = [Data(f"{data_dir}: wizard_of_wikipedia", columns, ("train", "valid", "test"), local=True)]
    start, trained = settings.model or "a model pre-trained here", []
    if settings.pretraining is not None:
        before = settings.pretraining
        data += [Data(f"{data_dir}: {name}", ("text",), ("train",), local=True) for name in before.texts]
        if before.copying is not None:
            trained.append(Step("copying", "random weights", before.copies, before.copying))
        trained.append(Step("infilling", "copying", None, before.training))
    swapped = f", with {settings.swapped:g} swapped turns to each" if settings.swapped else ""
    trained.append(Step(f"dialogue{swapped}", start, settings.train, settings.dialogue))
    if settings.swapped:
        trained.append(Step("dialogue without swapped turns", start, settings.train, settings.dialogue))
    then = ["curvature of the models"]
    if settings.paper:
        held = " under H_0 / N" if settings.penalty else ""
        trained.append(Step(f"hallucinating{held}", "dialogue", None, settings.hallucinating))
        then.append(f"removal at {len(settings.strengths)} strengths and {len(settings.dampings) + 1} dampings")
    if settings.comparing is not None:
        trained += steps(settings.comparing, "hallucinating")
        then.append(FOLLOWED)
    then += [
        f"answers to {'all' if settings.test is None else settings.test} test turns, {settings.beams} beams",
    ]
    return Plan(models, data, trained, then)
