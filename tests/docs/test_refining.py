"""What docs/refining.md says in words about its numbers, against the numbers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).parents[2]
WORDS = " ".join((ROOT / "docs" / "refining.md").read_text("utf-8").split())
CASES = list(json.loads((ROOT / "benchmarks" / "results" / "teachers.json").read_text("utf-8"))["cases"].values())


def losses(method: str, rows: int, share: float) -> list[float]:
    return [case[f"{method}, {rows} rows, teaching {share:g}"]["loss"] for case in CASES]


def closed(rows: int, share: float) -> str:
    """The share of the gap in loss to joint training that Newton closed, the mean over the seeds."""
    pairs = zip(CASES, losses("newton", rows, share), strict=True)
    gaps = [(c["merge"]["loss"] - loss) / (c["merge"]["loss"] - c["joint"]["loss"]) for c, loss in pairs]
    return f"{100 * fmean(gaps):.0f} %"


def better(method: str, rows: int, share: float, than: float) -> int:
    """On how many seeds a share ended at a lower loss than another."""
    return sum(a < b for a, b in zip(losses(method, rows, share), losses(method, rows, than), strict=True))


def test_what_is_said_of_teachers_holds() -> None:
    assert len(CASES) == 5 and better("newton", 50, 0.5, 0) == better("newton", 200, 0.5, 0) == 5
    assert f"closed {closed(50, 0.5)} with 50 rows, where labels closed {closed(50, 0)}, and" in WORDS
    assert f"and {closed(200, 0.5)} with 200, where labels closed {closed(200, 0)}." in WORDS
    assert better("adamw", 50, 0.5, 0) + better("adamw", 200, 0.5, 0) == 8
    assert all(fmean(losses("adamw", rows, 0.5)) < fmean(losses("adamw", rows, 0)) for rows in (50, 200))
    assert better("newton", 50, 1, 0.5) == 3 and better("newton", 200, 0.5, 1) == 5
    assert f"teachers alone closed {closed(50, 1)}, more on three of the five seeds" in WORDS
    assert f"with 200 they closed {closed(200, 1)}, less on all five." in WORDS


def test_what_is_said_of_the_base_as_a_start_holds() -> None:
    for method, rows, share in product(("newton", "adamw"), (50, 200), (0, 0.5, 1)):
        assert fmean(losses(method, rows, share)) < fmean(losses(f"base, {method}", rows, share))
    pairs = {rows: [losses(f"{start}newton", rows, 0) for start in ("", "base, ")] for rows in (50, 200)}
    for rows, said in ((50, "a loss of {} against {} with 50 rows"), (200, "of {} against {} with 200")):
        assert said.format(*(f"{fmean(one):.3f}".removeprefix("0") for one in pairs[rows])) in WORDS
        assert sum(a < b for a, b in zip(*pairs[rows], strict=True)) == 4
