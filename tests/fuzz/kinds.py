"""All kinds of mutated input, by name."""

from __future__ import annotations

from . import curvature, data, models, refinement
from .trial import Kind

KINDS: dict[str, type[Kind]] = {
    kind.name: kind for kind in [*models.KINDS, *curvature.KINDS, *data.KINDS, *refinement.KINDS]
}
