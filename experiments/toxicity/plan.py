"""What a run would fetch and train."""

from __future__ import annotations

from pathlib import Path

from ..common.plan import Data, Model, Plan, Step
from ..common.removal import FOLLOWED, steps
from .data import PROMPTS, REVIEWS, TOXIC, WIKI
from .scorer import TFIDF
from .settings import TOXIC_FROM, Settings


def plan(settings: Settings, model: str | None, data_dir: Path | None, scorer: str) -> Plan:
    models = [Model(model, "the base")] if model else []
    models += [Model(scorer, "says how toxic a continuation is")] if scorer != TFIDF else []
    splits = ("train", "validation", "test")
    if data_dir is None:
        data = [
            Data(WIKI, ("text",), splits, f"its first {settings.curvature_examples:,} texts are measured on"),
            Data(TOXIC, ("text", "toxicity"), splits, f"comments with a toxicity of at least {TOXIC_FROM:g}"),
            Data(PROMPTS, ("prompt",), ("train",), f"{settings.prompts + settings.dev_prompts:,} prompts"),
        ]
    else:
        names = ["wikitext2", "jigsaw_toxic", *(REVIEWS if settings.more_kinds else ())]
        data = [Data(f"{data_dir}: {name}", ("text",), ("train", "test"), local=True) for name in names]
        data.append(Data(f"{data_dir}: real_toxicity_prompts", ("text", "toxicity"), ("prompts",), local=True))
    trained = []
    if settings.pretraining is not None:
        trained = [
            Step(name, "random weights", None, settings.pretraining.training)
            for name in ("base", "the same without toxic comments")
        ]
    trained += [Step(f"toxic, {name}", "the base", None, how) for name, how in settings.tunings.items()]
    then = ["curvature of the base and of the toxic models"]
    if settings.tunings:
        dampings = sum(len(values) for values in settings.dampings.values())
        then.append(f"removal at {len(settings.strengths)} strengths and {dampings} dampings; perplexity of each")
    if settings.comparing is not None:
        trained += steps(settings.comparing, "toxic")
        then.append(FOLLOWED)
    then += [
        f"{settings.new_tokens} tokens after every prompt from each model that is chosen",
    ]
    return Plan(models, data, trained, then)
