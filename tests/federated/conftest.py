"""Fixtures for refinement with clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def short_rounds() -> Iterator[None]:
    """A step a round, on both sides of every comparison: each is four questions or more to every client."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gradmerge.refinement.newton.STEPS", 1)
        yield
