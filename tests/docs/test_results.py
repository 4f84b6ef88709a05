"""Numbers that are typed on the page of results are those of the runs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from docs.results_tables import RESULTS, read
from experiments.common import removal_report
from experiments.common.tables import shown
from experiments.refinement import report as refinement
from experiments.sentiment import grid, report as sentiment
from experiments.sentiment.merging import RULES
from experiments.vision import report as vision

from docs import results_overview
from gradmerge.refinement import adamw

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "results.md").read_text("utf-8")
WORDS = " ".join(PAGE.split())
README, REFINING = (" ".join((ROOT / name).read_text("utf-8").split()) for name in ("README.md", "docs/refining.md"))


def test_what_is_said_of_hallucination() -> None:
    results = read("hallucination")
    compared = [seed["comparison"] for seed in results["seeds"]]
    gone = {way: removal_report.both(results, way) for way in compared[0]["ways"]}
    ours, plain = gone["influence-kronecker"], gone["negation"]

    def loss(points: Sequence[tuple[float, float]]) -> str:
        return shown([point[1] for point in points], 0)

    assert f"swapped turns {loss(ours)} % of the way to the retrained model's, negation {loss(plain)} %" in WORDS
    assert all(round(fmean(p[1] for p in gone[way])) == 13 for way in gone if way.startswith("matching"))
    assert f"In KL they go *away* from the retrained model: {each(f'{-point[0]:.0f}' for point in ours)} %" in WORDS
    assert f"negation comes {shown([point[0] for point in plain], 0)} % nearer" in WORDS
    forgot = [round(fmean(point[1] for point in points)) for points in (ours, plain)]
    assert f"they forget {forgot[0]} % in loss, negation {forgot[1]}, but" in WORDS

    def grounding(way: str) -> str:
        shares = []
        for one in compared:
            places = one["limits"]["base"], one["ways"][way]["chosen"], one["limits"]["target"]
            low, here, top = (entry["forget"] - entry["kept"] for entry in places)
            shares.append(100 * (here - low) / (top - low))
        return each(f"{share:.0f}" for share in shares)

    assert f"grounding they close {grounding('influence-kronecker')} % of the gap" in WORDS
    assert f"negation {grounding('negation')}, NPO {grounding('npo')}." in WORDS

    def times(name: str) -> str:
        run, ways = read(name), ("influence-kronecker", "negation")
        one, other = (fmean(point[1] for point in removal_report.both(run, way)) for way in ways)
        return f"{one / other:.1f}"

    assert f"in loss it is {times('toxicity')} and {times('hallucination')} times" in WORDS
    rounds = {len(one["ways"]["influence-kronecker"]["rounds"]) for one in compared}
    assert results["settings"]["comparing"]["keep_rows"] == 2000 and rounds == {8}
    sweep = (RESULTS / "hallucination" / "sweep" / "results.md").read_text("utf-8")
    assert all(f"| {number} |" in sweep for number in ("49.9", "18.1", "25.3"))


def short(value: float, digits: int = 3) -> str:
    return f"{value:.{digits}f}".removeprefix("0")


def test_losses_of_sentiment_seed_by_seed() -> None:
    results = read("sentiment")
    weights = results["settings"]["weights"]

    def losses(method: str) -> list[str]:
        return [
            short(
                sentiment.average_loss(
                    seed["scores"][method]
                    if method in seed["scores"]
                    else sentiment.at_weight(seed, weights, method.removesuffix(", tuned"), weight)
                )
            )
            for seed in results["seeds"]
            for weight in [sentiment.best_weight(seed, weights, "task-arithmetic", "test") if "tuned" in method else 1]
        ]

    mean, tuned, total = (losses(m) for m in ("gradient-matching-mean", "task-arithmetic, tuned", "gradient-matching"))
    pairs = sorted(zip(mean, tuned, strict=True))
    assert sum(float(a) < float(b) for a, b in pairs) == 2
    assert all(f"{a} against {b}" in WORDS for a, b in pairs if a != b) and f"({pairs[-1][0]})" in WORDS
    assert f"({total[0]}, {total[1]} and {total[2]})" in WORDS
    joint = losses("joint")
    assert f"Joint training has {min(joint)} to {max(joint)}" in WORDS
    fell = (RESULTS / "sentiment" / "results.md").read_text("utf-8")
    assert "in 12 of 15 cases" in WORDS and "smaller mismatch in 12 of 15 cases" in fell


def each(values: Iterable[str]) -> str:
    """Of three seeds."""
    first, second, third = values
    return f"{first}, {second} and {third}"


def test_what_is_said_of_t5() -> None:
    results, first = read("sentiment", "t5"), read("sentiment")
    weights, seeds = results["settings"]["weights"], results["seeds"]

    def own(run: Mapping[str, Any]) -> str:
        scores = [seed["scores"]["imdb"]["imdb"]["test"] for seed in run["seeds"]]
        return f"{fmean(100 * one['right'] / one['rows'] for one in scores):.1f}"

    without = results["pretrained"]["base without"]
    assert f"It has {own(results)} % on IMDB after its own tuning" in WORDS
    assert f"and {100 * without['right'] / without['rows']:.1f} without the pre-training" in WORDS
    assert f"where MiniLM has {own(first)}" in WORDS

    def at(method: str, chosen: Sequence[float]) -> str:
        scores = [sentiment.at_weight(seed, weights, method, w) for seed, w in zip(seeds, chosen, strict=True)]
        return shown([sentiment.average(one) for one in scores])

    mean = shown([sentiment.average(seed["scores"]["gradient-matching-mean"]) for seed in seeds])
    assert f"({at('gradient-matching', [1.0] * 3)}, or {mean} with averaged" in WORDS
    assert f"task arithmetic does, which has {at('task-arithmetic', [1.0] * 3)}" in WORDS
    tuned = [sentiment.best_weight(seed, weights, "task-arithmetic", "test") for seed in seeds]
    assert f"weight tuned on test ({at('task-arithmetic', tuned)})" in WORDS
    names = ("fisher-averaging-mean of four", "ties", "gradient-matching-mean")
    means = [fmean(sentiment.average(seed["scores"][name]) for seed in seeds) for name in names]
    assert f"TIES ({means[1]:.1f}) and Fisher averaging of the four tuned models ({means[0]:.1f})" in WORDS
    losses = [fmean(sentiment.average_loss(seed["scores"][name]) for seed in seeds) for name in names]
    assert f"within {short(max(losses[:2]) - losses[2])} of its own" in WORDS
    every = [sentiment.at_weight(seed, weights, "gradient-matching", 1.0) for seed in seeds]  # with the sum
    scores = [[seed["scores"][name] for seed in seeds] for name in ("imdb", names[2], names[0])]
    base, mean_, fisher, sum_ = (
        fmean(100 * one["imdb"]["test"]["right"] / one["imdb"]["test"]["rows"] for one in model)
        for model in (*scores, every)
    )
    assert f"the two lose {base - mean_:.1f} and {base - sum_:.1f} points against the base" in WORDS
    assert f"Fisher averaging of the four {base - fisher:.1f}." in WORDS
    assert fmean(map(sentiment.average, every)) < min(means)
    said = (RESULTS / "sentiment" / "t5" / "results.md").read_text("utf-8")
    assert "in 15 of 15 cases" in WORDS and "smaller mismatch in 15 of 15 cases" in said


def test_what_is_said_in_short() -> None:
    merged = {case.title: case.shares() for case in results_overview.cases()}
    demo, texts, images = merged.values()

    def percent(points: Sequence[tuple[float, float]], part: int = 0) -> str:
        return f"{fmean(point[part] for point in points):.0f}"

    refined, same = results_overview.REFINED, results_overview.SAME_ROWS
    assert f"joint training and {percent(texts[refined])} % of its gain in accuracy" in WORDS
    seeds = each(f"{point[0]:.0f}" for point in texts[same])
    assert f"the base, by AdamW, has {percent(texts[same])} % ({seeds})" in WORDS
    from_base = [percent(own[results_overview.SAME_TAUGHT]) for own in merged.values()]
    assert f"taught on the same rows, has {each(from_base)} %" in WORDS
    assert all(point[1] > 100 for point in texts[refined])
    assert percent(demo[refined]) == percent(demo[refined], 1)
    assert f"the demo has {percent(demo[refined])} % of joint training's gain in accuracy and loss" in WORDS
    assert f"and {percent(demo[same])} % of both where the steps start at the base" in WORDS
    assert percent(demo[same]) == percent(demo[same], 1)
    assert f"On DeiT-tiny it is {percent(images[refined])} %" in WORDS
    assert f"has {percent(images[same])} % ({each(f'{point[0]:.0f}' for point in images[same])})" in WORDS
    assert all(
        " to ".join(f"{end(float(percent(own[name])) for own in merged.values()):.0f}" for end in (min, max)) + " %"
        in README
        for name in (refined, results_overview.TAUGHT)
    )
    less = [
        int(percent(own[results_overview.TAUGHT])) - int(one)
        for own, one in zip(merged.values(), from_base, strict=True)
    ]
    assert f"bring {min(less)} to {max(less)} points less" in README
    taught = [percent(own[results_overview.TAUGHT]) for own in merged.values()]
    assert f"{taught[0]}, {taught[1]} and {taught[2]} % of joint training's gain in accuracy" in WORDS
    matching = "gradient matching, weight 1"
    assert f"keeps {percent(demo[matching])}, {percent(texts[matching])} and {percent(images[matching])} %" in WORDS
    for own in (demo, texts):  # "as good": within the spread between seeds
        spread = stdev(point[0] for point in own["Fisher averaging"])
        assert abs(fmean(a[0] - b[0] for a, b in zip(own["Fisher averaging"], own[matching], strict=True))) < spread
    assert (
        f"{percent(texts[matching])}, and {percent(other_penalty())} in place of {percent(images[matching])}" in WORDS
    )
    assert f"Iso-C {percent(images['Iso-C'])} %" in WORDS and f"RegMean {percent(images['RegMean'])}" in WORDS
    digits, toxic, _ = results_overview.removals().values()
    influence = results_overview.INFLUENCE
    assert f"toxic comments {percent(toxic[influence], 1)} % of the way" in WORDS
    assert f"negation {percent(toxic['negation'], 1)} %, NPO, untuned, {percent(toxic['NPO'], 1)};" in WORDS
    assert f"digits {percent(digits[influence], 1)} and {percent(digits['negation'], 1)}" in WORDS

    def times(own: Mapping[str, Sequence[tuple[float, float]]]) -> str:
        return f"{fmean(p[0] for p in own[influence]) / fmean(p[0] for p in own['negation']):.1f} times as much"

    assert f"close {times(toxic)} as negation on toxic comments, and {times(digits)} on digits" in WORDS
    theory = toxic["gradient matching, tuned under H_0"]
    assert f"{percent(theory)} % of the KL to the retrained model is gone" in WORDS
    assert f"negating the same model, {percent(toxic['negation, tuned under H_0'])} %" in WORDS
    assert f"as near as another retraining comes ({percent(toxic[results_overview.FLOOR])})" in WORDS


def other_penalty() -> list[tuple[float, float]]:
    """Shares of DeiT-tiny's gap with P = H_0, where the overview has P = 0."""
    results = read("vision", "deit-tiny")
    place, found = results["settings"]["weights"].index(1.0), []
    for seed in results["seeds"].values():
        curve = seed["curves"]["gradient-matching, Fisher of the base, sampled labels"]["test"]
        low, top = (vision.over_tasks(seed["references"][name]["test"]) for name in ("base", "joint"))
        found.append((100 * (vision.over_tasks(vision.at(curve, place)) - low) / (top - low), 0.0))
    return found


def test_what_is_said_of_toxicity() -> None:
    results = read("toxicity")
    compared = [seed["comparison"] for seed in results["seeds"]]

    def perplexity(*path: str) -> str:
        found = compared
        for key in path:
            found = [one[key] for one in found]
        return f"{fmean(math.exp(one['forget']) for one in found):.0f}"

    assert f"from {perplexity('limits', 'base')} to {perplexity('limits', 'target')}" in WORDS
    ways = ("negation", "influence-kronecker", "influence-diagonal", "npo")
    plain, kronecker, diagonal, npo = (perplexity("ways", way, "chosen") for way in ways)
    assert f"Negation comes to {plain}, influence steps with Kronecker curvature to {kronecker}" in WORDS
    assert f"with a diagonal to {diagonal}, NPO to {npo}" in WORDS
    beyond = {
        way: removal_report.cell(removal_report.shares(results, way, floors=True), 0) for way in compared[0]["ways"]
    }
    assert f"negation closes {beyond['negation']} % of what is left" in WORDS
    assert f"influence steps {beyond['influence-kronecker']}, gradient matching" in WORDS
    assert f"tuned under H_0 {beyond['matching-theory']}" in WORDS
    steps = [one["ways"]["matching-theory"]["moved"] for one in compared]
    assert f"a step {fmean(one['removed'] / one['tuned'] for one in steps):.2f} times the change" in WORDS
    assert f"is {fmean(one['training']['theory']['residual'] for one in compared):.2f} of that of the loss" in WORDS
    rises = [100 * one["ways"]["influence-kronecker"]["default"]["rise"] for one in compared]
    assert f"+{shown(rises, 0)} %" in WORDS

    def rise(way: str, which: str, kind: str) -> list[float]:
        """Of the perplexity of one kind of text, in per cent."""
        pairs = [(one["ways"][way][which]["loss"][kind], one["limits"]["base"]["loss"][kind]) for one in compared]
        return [100 * math.expm1(now - before) for now, before in pairs]

    kinds = ("wiki", "reviews", "comments")
    lost, ours = ([round(fmean(rise(way, "chosen", kind))) for kind in kinds] for way in ways[:2])
    assert f"rise by {lost[0]}, {lost[1]} and {lost[2]} % with negation, by {ours[0]}, {ours[1]} and" in WORDS
    assert f"and {ours[2]} with influence steps" in WORDS
    assert f"other comments rises by {ours[2]} %, and by {lost[2]} with negation" in WORDS
    far, near = (shown(rise("influence-kronecker", "default", kind), 0) for kind in ("wiki", "comments"))
    assert f"other comments (+{near} %; WikiText +{far})" in WORDS
    tokens = {kind: results["data"][f"{kind}.train"]["tokens"] for kind in kinds}
    assert f"{100 * tokens['comments'] / sum(tokens.values()):.0f} % of the training rows" in WORDS
    share = {way: [one[0] for one in removal_report.both(results, way)] for way in ways}
    times = [a / b for a, b in zip(share["influence-kronecker"], share["negation"], strict=True)]
    assert f"({min(times):.1f} to {max(times):.1f} times, depending on the seed)" in WORDS


def test_what_is_said_of_the_grid() -> None:
    results = read("sentiment", "grid")
    first = read("sentiment")

    def mean(tuning: str = "plain", **cell: str) -> float:
        return fmean(map(sentiment.average, sentiment.cell_scores(results, tuning=tuning, **cell)))

    every = [asdict(cell) for cell in grid.cells() if cell.tuning == "plain"]
    for cell in every:
        both = [mean(**{**cell, "tuning": tuning}) for tuning in grid.TUNINGS]
        complete = len(sentiment.cell_scores(results, **{**cell, "tuning": "prior"})) == 3
        assert not complete or abs(both[0] - both[1]) <= 0.04
    diagonal = [cell for cell in every if cell["curvature"] == "diagonal"]
    for cell in diagonal:
        assert mean(**{**cell, "penalty": "H_0"}) - mean(**{**cell, "penalty": "none"}) >= 0.45
        assert abs(mean(**cell) - mean(**{**cell, "labels": "empirical"})) < 0.1
    without = sentiment.cell_scores(
        results, tuning="plain", curvature="diagonal", labels="empirical", reduction="mean", penalty="none"
    )
    shares = [
        (sentiment.average(one) - sentiment.average(low)) / (sentiment.average(top) - sentiment.average(low))
        for one, seed in zip(without, results["seeds"], strict=True)
        for low, top in [(seed["scores"]["imdb"], seed["scores"]["all-data"])]
    ]
    assert f"The other P gives {100 * fmean(shares):.0f} % in place of" in WORDS
    for name in ("imdb", "all-data", "joint", *RULES):
        old, new = (fmean(sentiment.average(s["scores"][name]) for s in run["seeds"]) for run in (first, results))
        assert abs(old - new) <= 0.04


def test_what_is_said_of_deit_tiny() -> None:
    results = read("vision", "deit-tiny")
    seeds, weights = list(results["seeds"].values()), results["settings"]["weights"]

    def at_one(name: str, part: str = "test") -> float:
        place = weights.index(1.0)
        return fmean(vision.over_tasks(vision.at(s["curves"][name][part], place)) for s in seeds)

    bare = "gradient-matching, Fisher of the base, no penalty, sampled labels"
    matching, arithmetic = (
        (f"{at_one(name):.1f}", short(at_one(name, "loss"), 2)) for name in ("gradient-matching", "task-arithmetic")
    )
    assert f"gradient matching has {matching[0]} % (loss {matching[1]}), task arithmetic {arithmetic[0]}" in WORDS
    assert f"{arithmetic[0]} ({arithmetic[1]})" in WORDS
    assert f"no penalty {at_one(bare):.1f} ({short(at_one(bare, 'loss'), 2)})" in WORDS
    regmean = fmean(vision.over_tasks(s["fixed"]["regmean"]["test"]) for s in seeds)
    assert f"TSV {at_one('tsv'):.1f}, Iso-C {at_one('iso-c'):.1f}, RegMean {regmean:.1f}" in WORDS
    curve = [fmean(vision.mean_curve(s["curves"]["gradient-matching"]["test"])[n] for s in seeds) for n in range(7)]
    assert f"is flat ({min(curve):.1f} to {max(curve):.1f})" in WORDS
    times = fmean(s["scalar_of_base"]["mean"] for s in seeds) / fmean(s["scalar"]["mean"] for s in seeds)
    assert f"its mean entry is {times:.0f} times" in WORDS
    refined = read("refinement", "deit-tiny")

    def share(name: str, what: str = "accuracy") -> str:
        return shown([refinement.share(seed, name, what) for seed in refinement.having(refined, name)], 0)

    adamw, taught, same = "adamw, 1024 rows", "adamw, taught, 1024 rows", "base tuned on the same 1024 rows"
    assert f"closes {share(adamw)} % of the gap to joint training (loss: {share(adamw, 'loss')} %)" in WORDS
    by_seed = each(f"{refinement.share(seed, same, 'accuracy'):.0f}" for seed in refined["seeds"])
    assert f"the same ones closes {by_seed} %" in WORDS
    pairs = [[refinement.mean(s["scores"][name], "loss") for name in (same, adamw)] for s in refined["seeds"]]
    more = sorted(theirs - ours for theirs, ours in pairs)
    assert f"a loss that is {short(more[0])} to {short(more[-1])} higher" in WORDS
    assert f"it closes {share(taught)} % (loss: {share(taught, 'loss')} %)" in WORDS
    refined = read("refinement", "deit-tiny", file="base-taught")
    for name, said in (("base taught on the same 1024 rows", "closed {} % of the gap"), (taught, "and the merge {}:")):
        assert (
            said.format(each(f"{refinement.share(seed, name, 'accuracy'):.0f}" for seed in refined["seeds"])) in WORDS
        )
    refined = read("refinement", "deit-tiny", file="judged-by-training-rows")
    assert f"AdamW closed {share(adamw)} % in two passes" in WORDS
    assert f"256 rows close {share('newton, 256 rows')} by Newton steps" in WORDS
    refined = read("refinement", "deit-tiny", file="eight-passes")
    assert f"and {share(adamw)} % in eight" in WORDS


@pytest.mark.parametrize("name", ["text", "images", "deit-tiny"])
def test_tables_of_refinement_have_every_model_on_every_seed(name: str) -> None:
    results = read("refinement", name)
    assert all(len(refinement.having(results, model)) == 3 for model in refinement.rows_of(results))


def test_what_is_said_of_refinement() -> None:
    results = read("refinement", "text")
    seeds, newton = results["seeds"], "newton, 2048 rows"

    def shares(name: str, what: str = "accuracy") -> list[float]:
        return [refinement.share(seed, name, what) for seed in seeds]

    def share(name: str, what: str = "accuracy") -> str:
        return shown(shares(name, what), 0)

    def scores(name: str, what: str = "accuracy") -> list[float]:
        return [(100 if what == "accuracy" else 1) * refinement.mean(seed["scores"][name], what) for seed in seeds]

    def gains(name: str, start: str, what: str = "accuracy") -> list[float]:
        return [a - b for a, b in zip(scores(name, what), scores(start, what), strict=True)]

    def by_seed(name: str, what: str = "accuracy") -> str:
        return each(f"{one:.0f}" for one in shares(name, what))

    shows = {"accuracy": "{:.1f}".format, "loss": short}
    merge, taught, alone = "gradient matching", "adamw, taught, 2048 rows", "adamw, 2048 rows"
    assert f"({by_seed(newton, 'loss')} % of the gap)" in WORDS and f"({by_seed(newton)})" in WORDS
    gained, wanted, most = (fmean(gains(name, merge)) for name in (newton, "joint", taught))
    said = f"{gained:.1f} of the {wanted:.1f} points are gained, and {most:.1f} by AdamW with teachers"
    assert said in WORDS

    every, labels = "newton, all rows", "adamw, all rows"
    assert f"{by_seed(every)} % of the gap in accuracy and {by_seed(every, 'loss')} % of that in loss" in WORDS
    assert f"AdamW by labels closes {by_seed(labels)} % in accuracy and {by_seed(labels, 'loss')} % in loss" in WORDS
    assert {len(seed["refinements"][every]["lengths"][-1]) for seed in seeds} == {2}
    assert sum(one > 100 for one in shares(every, "loss")) == 2 and max(shares(labels, "loss")) < 100
    assert max(shares(every) + shares(labels)) < 100
    ahead, from_base = "adamw, taught, all rows", "base taught on the same all rows"
    for what, show in shows.items():
        assert f"({' against '.join(each(map(show, scores(name, what))) for name in (ahead, 'joint'))})" in WORDS
        sign = 1 if what == "accuracy" else -1
        assert all(sign * one > 0 for name in (ahead, from_base) for one in gains(name, "joint", what))
    assert f"closes {share(from_base)} % of the merge's gap in accuracy, from the merge {share(ahead)}" in WORDS
    over, over_of_base = gains(ahead, "joint"), gains(from_base, "joint")
    assert f"from the base, by {min(over_of_base):.1f} to {max(over_of_base):.1f} points" in WORDS

    def of_the_gain(name: str) -> str:
        both = zip(gains(name, "base"), gains("joint", "base"), strict=True)
        return f"{fmean(100 * own / whole for own, whole in both):.0f} %"

    assert f"of its gain in accuracy, {of_the_gain(alone)} by AdamW" in WORDS
    kept = [of_the_gain(name) for name in (ahead, from_base, labels)]
    assert (
        f"the merge has {kept[0]}, ahead of joint training on all three seeds by {min(over):.1f} to {max(over):.1f} "
        f"points, and the base {kept[1]}; by labels alone the merge has {kept[2]}"
    ) in WORDS

    assert f"it closes {share(taught)} % of the gap in accuracy with them and {share(alone)} without" in WORDS
    from_base, few = "base taught on the same 2048 rows", "base taught on the same 256 rows"
    for name, said in (
        (from_base, "close {} % of the merge's gap in accuracy and {} %"),
        (taught, "the merge {} and {}"),
    ):
        assert said.format(share(name), share(name, "loss")) in WORDS
    assert f"from the merge they close {share('adamw, taught, 256 rows')} %" in WORDS
    assert f"from the base they end {-fmean(gains(few, merge)):.1f} points below the merge as it was" in WORDS
    assert min(gains("adamw, taught, 256 rows", few)) > 1 and max(gains(few, merge)) < 0
    newton_taught = "newton, taught, 2048 rows"
    assert f"({share(newton_taught)} % with 2,048 texts, and {share(newton)} without)" in WORDS
    for name, said in ((newton, "{} to {} for Newton with 2,048 texts"), (taught, "{} to {} for AdamW with teachers")):
        seconds = [seed["refinements"][name]["seconds"] for seed in seeds]
        assert said.format(f"{min(seconds):.0f}", f"{max(seconds):.0f}") in WORDS

    behind = gains(taught, from_base)
    assert f"it is behind these by {min(behind):.2f} to {max(behind):.2f} points" in WORDS
    assert abs(fmean(gains(from_base, taught, "loss"))) < 0.001
    assert sum(one < 0 for one in gains(from_base, newton, "loss")) == 2
    assert sum(one > 0 for one in gains(from_base, newton)) == 1
    assert min(gains(newton, alone)) > 0 > max(gains(newton, alone, "loss"))
    assert sum(one < 0 for one in gains("adamw, 256 rows", "newton, 256 rows", "loss")) == 2
    tuned = "base tuned on the same 2048 rows"
    for what, show in shows.items():
        assert f"({' against '.join(each(map(show, scores(name, what))) for name in (tuned, newton))})" in WORDS

    def judged(name: str) -> list[float]:
        return [seed["refinements"][name]["held_back"][-1] for seed in seeds]

    # Those that the overview shows.
    assert all(own < other for own, other in zip(judged(newton), judged(alone), strict=True))
    assert fmean(judged(taught)) < fmean(judged(newton_taught))
    for said in (
        f"it closed {share(taught)} % with 2,048 rows",
        f"by labels alone {share(alone)}, and",
        f"`newton` on sentiment {share(newton_taught)} and {share(newton)}",
        f"as the merge: {share(from_base)} % on sentiment",
    ):
        assert said in REFINING
    name = "base taught on the same 1024 rows"
    images = [
        refinement.share(seed, name, "accuracy")
        for seed in read("refinement", "deit-tiny", file="base-taught")["seeds"]
    ]
    assert f"on sentiment, and {shown(images, 0)} on DeiT-tiny" in REFINING


def test_what_is_said_of_falls_within_their_error() -> None:
    before, now = (read("refinement", "text", file=file)["seeds"] for file in ("any-fall", "results"))
    alone, every, merge = "adamw, 2048 rows", "adamw, all rows", "gradient matching"

    def share(seeds: Sequence[Mapping[str, Any]], what: str) -> str:
        return shown([refinement.share(seed, alone, what) for seed in seeds], 0)

    def losses(seed: Mapping[str, Any], name: str) -> str:
        return " to ".join(short(refinement.mean(seed["scores"][one], "loss")) for one in (merge, name))

    assert [len(seed["refinements"][alone]["held_back"]) for seed in before].count(1) == 1
    assert f"the test loss rose from {losses(before[0], alone)}: {share(before, 'accuracy')} % of the gap" in WORDS
    assert f"was closed, and {share(before, 'loss')} of that in loss" in WORDS
    assert f"are tried, up to eight in all: {share(now, 'accuracy')} and {share(now, 'loss')}." in WORDS
    assert adamw.TRIALS == 8
    spans = [[seed["refinements"][alone]["seconds"] for seed in seeds] for seeds in (now, before)]
    later, earlier = (f"{min(span):.0f} to {max(span):.0f}" for span in spans)
    assert f"({later} seconds with 2,048 texts, {earlier} before)" in WORDS
    assert [seed["seed"] for seed in before if every in seed["scores"]] == [0]
    assert f"it ended at {losses(before[0], every).split()[-1]}" in WORDS
    held = now[0]["refinements"][every]["held_back"]
    assert f"fell by {100 * (1 - held[-1] / held[0]):.0f} % on the first seed" in WORDS
    assert f"that on the test rows rose from {losses(now[0], every)}" in WORDS
    assert f"on one of them the test loss rose from {losses(now[0], every)}" in REFINING
    few = "base tuned on the same 256 rows"
    assert [len(seed["refinements"][few]["held_back"]) for seed in now].count(1) == 1


def test_what_is_said_of_steps_of_one_task() -> None:
    before, now = (read("refinement", "text", file=file) for file in ("steps-of-one-task", "any-fall"))

    def share(results: Mapping[str, Any], name: str, what: str = "accuracy") -> str:
        return shown([refinement.share(seed, name, what) for seed in refinement.having(results, name)], 0)

    taught, fewer = "adamw, taught, all rows", "adamw, taught, 2048 rows"
    assert f"it closed {share(before, taught)} % of the gap in accuracy then, and {share(now, taught)} with" in WORDS
    assert f"and of that in loss {share(before, taught, 'loss')} and {share(now, taught, 'loss')}" in WORDS
    then, after = (f"{share(run, fewer)} and {share(run, fewer, 'loss')}" for run in (before, now))
    assert f"With 2,048 rows there is no clear difference: {then} then, {after} after." in WORDS
    for what, sign, count in (("accuracy", 1, 2), ("loss", -1, 3)):
        means = [[refinement.mean(seed["scores"][taught], what) for seed in run["seeds"]] for run in (before, now)]
        assert sum(sign * (b - a) > 0 for a, b in zip(*means, strict=True)) == count


def test_what_is_said_of_rows_that_judge_badly() -> None:
    results = read("refinement", "text", file="judged-by-training-rows")
    newton = [refinement.share(seed, "newton, 2048 rows", "accuracy") for seed in results["seeds"]]
    assert f"Newton closed {shown(newton, 0)} % of the gap in accuracy" in WORDS
    closed = [refinement.share(seed, "adamw, 2048 rows", "accuracy") for seed in results["seeds"]]
    assert f"and AdamW {shown(closed, 0)} %: less than with unseen judges" in WORDS
    judged = read("refinement", "text")["seeds"]
    for name, own in (("newton, 2048 rows", newton), ("adamw, 2048 rows", closed)):
        assert fmean(own) < fmean(refinement.share(seed, name, "accuracy") for seed in judged)
    alone, every = results["seeds"][0], "adamw, all rows"
    before, after = (short(refinement.mean(alone["scores"][name], "loss")) for name in ("gradient matching", every))
    held = alone["refinements"][every]["held_back"]
    assert f"the test loss there from {before} to {after}" in WORDS
    assert f"fell from {held[0]:.2f} to {held[-1]:.2f}, summed over the sets" in WORDS
    assert [name for name in alone["scores"] if "all rows" in name] == [every]
