"""The front matter of a result's card, from what the models that it was made from say of themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..checkpoints.hub_metadata import Published
from ..markdown import as_code, as_text
from ..notes import Note


def front_matter_of(
    parts: Sequence[Published],
    *,
    relation: str,
    bases: Sequence[Published] | None = None,
    library: str | None,
    tags: Sequence[str],
    pipeline: str | None = None,
    license: str | None = None,
) -> dict[str, Any]:
    """What the Hub reads of a card.

    Args:
        parts: The models that the result was made from.
        relation: How it stems from its base models: ``merge``, ``finetune`` or ``adapter``.
        bases: Which of the parts are base models; all by default.
        library: What opens it.
        tags: Words to find it by.
        pipeline: What it is for.
        license: The licence that the user chose; without, the one that all parts have.
    """
    ids = list(dict.fromkeys(one for part in (parts if bases is None else bases) for one in part.ids))
    front: dict[str, Any] = {"base_model": ids, "base_model_relation": relation} if ids else {}
    for key in ("language", "datasets"):
        values = list(dict.fromkeys(one for part in parts for one in getattr(part, key)))
        front |= {key: values} if values else {}
    front |= _license(parts, license)
    front |= {"library_name": library} if library is not None else {}
    front |= {"pipeline_tag": pipeline} if pipeline is not None else {}
    front["tags"] = list(dict.fromkeys(tags))
    return front


def _license(parts: Sequence[Published], chosen: str | None) -> dict[str, str]:
    if chosen is not None:
        return {"license": chosen}
    stated = {part.license for part in parts}
    return dict(stated.pop()) if len(stated) == 1 else {}


def licence_text(parts: Sequence[Published], chosen: str | None) -> str:
    """For the card: the licences that differ, where that leaves the result without one."""
    if not (found := _differing(parts, chosen)):
        return ""
    listed = "; ".join(f"{as_code(name)}: {as_text(text)}" for name, text in found)
    return (
        f"\nLicence: to be chosen. Those of the models that it was made from are not the same ({listed}), so that "
        "`license` above is left out.\n"
    )


def licence_notes(parts: Sequence[Published], chosen: str | None) -> list[str]:
    """For the user: the same, and what to do."""
    if not (found := _differing(parts, chosen)):
        return []
    listed = "; ".join(f"{name}: {text}" for name, text in found)
    return [
        Note(
            f"the licences of the models are not the same ({listed}), so that the card names none. Choose one that "
            "all of them allow: output.license of the recipe (--set output.license=…), or license in README.md"
        )
    ]


def _differing(parts: Sequence[Published], chosen: str | None) -> list[tuple[str, str]]:
    """Every model with its licence, where some have one and not all have the same."""
    if chosen is not None or len({part.license for part in parts}) < 2:
        return []
    return [
        (part.name, dict(part.license).get("license_name") or dict(part.license).get("license") or "not stated")
        for part in parts
    ]
