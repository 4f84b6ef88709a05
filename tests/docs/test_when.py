"""Numbers that are typed on the page about curvature are those of the studies."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from docs.results_tables import read
from experiments.common.tables import shown
from experiments.studies import report
from experiments.studies.settings import DIALS, GENTLE, SCALES, TRANSFORMER

WORDS = " ".join((Path(__file__).parents[2] / "docs" / "when.md").read_text("utf-8").split())
RESULTS = read("studies")
SEEDS = RESULTS["seeds"]
ACCURACY = partial(report.mean, what="accuracy")
KRONECKER = "kronecker, P = 0"


def at(dial: str, value: float | str) -> list[Any]:
    """The case of every seed."""
    return [case for seed in SEEDS for case in seed["studies"][dial] if case["value"] == value]


def part(dial: str, value: float | str, name: str, how: Any = report.mean) -> list[float]:
    return [report.share(case, name, how) for case in at(dial, value)]


def percent(values: list[float]) -> str:
    return f"{shown(values, 0)} %"


def of(dial: str, value: float | str, name: str, how: Any = report.mean, digits: int = 3) -> str:
    return shown([how(case, name) for case in at(dial, value)], digits)


def fact(dial: str, value: float | str, name: str, digits: int = 2) -> str:
    return f"{fmean(case['facts'][name] for case in at(dial, value)):.{digits}f}"


def said() -> dict[str, str]:
    """Phrases of the page with numbers in them."""
    by_rows = partial(report.mean, by_rows=True)
    linear = {
        name: percent([report.linear_share(seed["linear"]["logistic regression"], name) for seed in SEEDS])
        for name in ("full", "kronecker", "diagonal")
    }
    kl = partial(report.mean, what="kl")
    penalty, plain = "kronecker, P = H_0", KRONECKER
    tight = partial(of, "penalty", 1000)
    others = [value for value in DIALS["network"].values if value != 8]
    learned = [fmean(report.own_task(case, "base") for case in at("network", value)) for value in others]
    own = partial(of, "base", 300, how=report.own_task, digits=1)
    return {
        "LOGISTIC": f"whole Hessians close {linear['full']} of the gap in loss and Kronecker factors "
        f"{linear['kronecker']}, diagonals {linear['diagonal']}.",
        "EIGHT": f"badly, too ({of('network', 8, 'base', report.own_task, 1)} % of the test digits, where the others "
        f"have {min(learned):.0f} to {max(learned):.0f})",
        "NETWORKS": f"(by {fact('network', TRANSFORMER, 'moved')} and {fact('network', GENTLE, 'moved')} of the base's "
        f"norm, where two hidden layers moved by {fact('network', 2, 'moved')})",
        "AVERAGE": f"gets worse (a loss of {of('kinds', 0, 'average')}, then {of('kinds', 100, 'average')})",
        "KRONECKER": f"Kronecker curvature better ({of('kinds', 0, plain)}, then {of('kinds', 100, plain)})",
        "LABELS": f"closes {percent(part('labels', 0, plain))} of the gap in loss",
        "SIZES": f"close {percent(part('sizes', 1, plain, by_rows))} of the gap at 1 : 1 and "
        f"{percent(part('sizes', 30, plain, by_rows))} at 30 : 1, means only "
        f"{percent(part('sizes', 30, plain + ', mean', by_rows))}.",
        "MOVED": f"Models move by {fact('epochs', 3, 'moved')} to {fact('epochs', 100, 'moved')} of the base's norm",
        "KL": f"is {tight(penalty, kl, 4)}, where the average's is {tight('average', kl, 4)}",
        "JOINT": f"joint training has {tight('joint', lambda *one: 100 * ACCURACY(*one), 1)} % accuracy",
        "BEST": f"is {of('penalty', 10, penalty)} at strength 10, and {of('epochs', 100, plain)} after 100 epochs",
        "LONGER": f"{of('epochs', 30, 'average')} after 30 epochs, {of('epochs', 100, 'average')} after 100)",
        "BETTER": f"merges get better ({of('epochs', 30, plain)}, {of('epochs', 100, plain)})",
        "TIGHT": f"task arithmetic at weight 1 closes {percent(part('penalty', 1000, 'task-arithmetic'))} of the gap",
        "F_0": f"from a mean entry of {fact('base', 10, 'F_0')} to {fact('base', 300, 'F_0')}; on held-out rows it "
        f"stays ({fact('base', 10, 'F_0, held out')}, {fact('base', 300, 'F_0, held out')})",
        "BASE": f"close {percent(part('base', 300, plain))} of the gap in loss with F_0 from training rows, "
        f"{percent(part('base', 300, plain + ', held out'))} with held-out ones",
        "OWN": f"has {own(plain)} % accuracy with the first, {own(plain + ', held out')} % with the second",
        "HELD OUT": f"merges ({against('kronecker, P = H_0')}) and better in diagonal ones "
        f"({against('diagonal, P = H_0').replace(' of the gap in loss', '')})",
        "WRONG": f"With Kronecker curvature P = H_0 by assumption was up to {max(assumption()):.0f} points of the gap "
        f"worse than `none`, and up to {-min(assumption()):.0f} better",
        "WEIGHT": f"does better ({percent(part('network', 0, 'task-arithmetic, tuned'))} against "
        f"{percent(part('network', 0, plain))})",
    }


def against(name: str) -> str:
    """Held-out rows and the base's own ones."""
    first, second = (percent(part("base", 300, one)) for one in (f"{name}, held out", name))
    return f"{first} of the gap in loss against {second}"


def plain_cases() -> list[tuple[str, float | str]]:
    """Places of dials with networks of plain layers, tuned plainly."""
    return [
        (dial, value)
        for dial, about in DIALS.items()
        if dial != "penalty"
        for value in about.values
        if value not in (TRANSFORMER, GENTLE)
    ]


def assumption() -> list[float]:
    """What P = H_0 costs Kronecker merges of models that were tuned plainly, in points of the gap in loss."""
    return [
        fmean(part(dial, value, KRONECKER)) - fmean(part(dial, value, "kronecker, P = H_0"))
        for dial, value in plain_cases()
    ]


@pytest.mark.parametrize("phrase", said().values(), ids=said())
def test_phrases_have_the_numbers_of_the_run(phrase: str) -> None:
    assert phrase in WORDS


def test_the_run_is_the_one_that_the_page_tells_of() -> None:
    assert RESULTS["command"] == "python -m experiments.studies --scale small --seeds 1,2,3,4,5"
    assert [seed["seed"] for seed in SEEDS] == [1, 2, 3, 4, 5]
    settings = SCALES["small"]
    assert (settings.test, settings.valid, settings.base_rows, settings.rows) == (577, 300, 300, 620)
    weights = sum((a + 1) * b for a, b in zip(settings.shape, settings.shape[1:], strict=False))
    assert f"64 → 32 → 32 → 10 with tanh ({weights:,} weights)" in WORDS


def test_diagonals_close_less_than_a_fifth() -> None:
    equal = [(dial, value) for dial, value in plain_cases() if dial != "sizes"]
    names = [name for name in report.methods(RESULTS, "base") if name.startswith("diagonal")]
    found = {
        (dial, value, name): fmean(part(dial, value, name))
        for dial, value in equal
        for name in names
        if name in at(dial, value)[0]["scores"]
    }
    assert 15 < max(found.values()) < 20, max(found, key=lambda key: found[key])


def test_kronecker_curvature_without_a_penalty_is_safe_but_for_contradictions() -> None:
    worse = {
        (dial, value)
        for dial, value in plain_cases()
        if fmean(part(dial, value, KRONECKER)) < -stdev(part(dial, value, KRONECKER))
    }
    assert worse == {("labels", 10)}


def test_about_seventy_per_cent_with_hidden_layers_and_nothing_in_transformers() -> None:
    for value in (1, 2, 4):
        assert 65 < fmean(part("network", value, KRONECKER)) < 75
        assert fmean(part("network", value, "whole, P = 0")) < fmean(part("network", value, KRONECKER)) + 1
    for kind in (TRANSFORMER, GENTLE):
        every = {name: round(fmean(part("network", kind, name))) for name in report.methods(RESULTS, "network")}
        assert max(found for name, found in every.items() if name != "joint again") <= 15
        assert every[KRONECKER] < 5 and every["whole, P = 0"] < 0


def test_linear_regression_is_exact_to_eleven_digits() -> None:
    for seed in SEEDS:
        assert all(seed["linear"]["linear regression"][name]["distance"] < 1e-11 for name in ("full", "kronecker"))


def test_the_lowest_losses_are_where_the_page_says() -> None:
    for dial, name, best in (("penalty", "kronecker, P = H_0", 10), ("epochs", KRONECKER, 100)):
        losses = {v: fmean(report.mean(case, name) for case in at(dial, v)) for v in DIALS[dial].values}
        assert min(losses, key=lambda value: losses[value]) == best


def test_no_curvature_settles_contradictions() -> None:
    for name in report.methods(RESULTS, "labels"):
        if name.startswith(("diagonal", "kronecker", "fisher")):
            assert fmean(part("labels", 10, name)) < 0
        if name.endswith("P = H_0"):
            assert all(fmean(part("labels", value, name)) < 0 for value in DIALS["labels"].values)
