"""Whether the step of a removal can be trusted, judged before it is made, on all entries: a sample misses the few that
ruin a model.

The curvature of a removal was estimated at the base and at the tuned models. A step much longer than the distance
between them leads to where nothing is known of the loss. It is long where the base's curvature is almost 0 and a
tuned model's is not: (H_0 + H_t) / H̄_rest is huge there, and a few such entries can ruin the model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...checkpoints.checkpoint import Buffers
from ...curvature.summary import group_of
from ...errors import InputError
from ...notes import Kind, Note
from ...progress import Progress
from ...rules.kronecker_matching import applied
from ..plan.kronecker_layers import read_layer, solve_layer
from ..plan.plan import Job, Plan, converted, rule_arguments
from ..run.reading import read_block
from ..run.reduce import Advance
from ..run.spreading import Run, Spread, chunks, here, whole
from ..thread_pool import run_parallel, with_buffers
from .damping import find_damping

#: A step more than this many times as long as fine-tuning's is not trusted. Plain negation at strength 1 has a factor
#: of 1; curvature may rightly make a step somewhat longer.
WHOLE = 2.0
#: The same for one layer: it may go farther, as long as the whole model does not.
GROUP = 10.0
#: A group counts if it holds this share of the squared step: a tenth of the length.
NOTICEABLE = 0.01
#: Dampings that are tried for a better one.
DAMPINGS = tuple(float(f"1e{power}") for power in range(-10, 3))


@dataclass
class Step:
    """How far a removal goes, and how far fine-tuning went: sums of squares over entries.

    ``step`` is Σ (θ̂ − θ_0)² and ``tuning`` Σ (Σ_t |Δ_t|)². The felt ones weigh each entry by the removed data's
    curvature F = Σ_t F_t: Σ F (θ̂ − θ_0)² and Σ F (Σ_t |Δ_t|)².
    """

    step: float = 0.0
    tuning: float = 0.0
    felt_step: float = 0.0
    felt_tuning: float = 0.0

    def add(self, other: Step) -> None:
        self.step += other.step
        self.tuning += other.tuning
        self.felt_step += other.felt_step
        self.felt_tuning += other.felt_tuning

    @property
    def amplification(self) -> float:
        """‖θ̂ − θ_0‖ / ‖Σ |Δ_t|‖; 0 where nothing moves."""
        return math.sqrt(self.step / self.tuning) if self.tuning else 0.0

    @property
    def felt(self) -> float:
        """The same in the norm of the removed data's curvature: most entries hardly matter; those that do move most."""
        return math.sqrt(self.felt_step / self.felt_tuning) if self.felt_tuning else 0.0


@dataclass
class Judgement:
    """The steps of a removal with one damping, per layer group."""

    damping: float
    groups: dict[str, Step] = field(default_factory=dict)
    looked_at: int = 0
    """Entries that were looked at."""

    @property
    def whole(self) -> Step:
        total = Step()
        for step in self.groups.values():
            total.add(step)
        return total

    @property
    def worst(self) -> str:
        """The group with the largest amplification among those that hold a noticeable share of the step."""
        least = NOTICEABLE * self.whole.step
        seen = {name: step.amplification for name, step in self.groups.items() if step.step >= least}
        return max(seen, key=lambda name: seen[name])

    @property
    def excess(self) -> float:
        """How many times the step is longer than what is trusted, in all or in a group: fine up to 1."""
        if not self.groups or not math.isfinite(self.whole.step):
            return 0.0  # values that are not finite are found and named by the merge
        whole = max(self.whole.amplification, self.whole.felt)
        excess = max(whole / WHOLE, self.groups[self.worst].amplification / GROUP)
        return round(excess, 9)  # a step of exactly twice negation's, as the cap makes it, is fine


def judge_removal(
    plan: Plan, threads: int, progress: Progress, *, refuse: bool, spread: Spread | None = None
) -> list[Note]:
    """A note, or with ``refuse`` an error, if the plan is a removal whose step is too long."""
    if "step-size" in plan.rule.checks:
        progress.begin("judging", plan.total_read)
    notes = trust_notes(plan, threads, progress.advance, spread)
    if notes and refuse:
        raise InputError(f"{notes[0]} To write it all the same, pass --accept-untrusted.")
    return notes


def trust_notes(
    plan: Plan, threads: int = 1, advance: Advance = lambda nbytes: None, spread: Spread | None = None
) -> list[Note]:
    """A note if the plan is a removal whose step is too long."""
    if "step-size" not in plan.rule.checks:
        return []
    find_damping(plan, threads, spread=spread)
    (judged,) = judge(plan, [plan.inputs.damping_of(plan.rule)], threads, advance, spread)
    if judged.excess <= 1:
        return []
    amplification, worst = judged.whole.amplification, judged.groups[judged.worst].amplification
    larger = [damping for damping in DAMPINGS if damping > judged.damping]
    tried = judge(plan, larger, threads, spread=spread) if larger else []
    enough = next((judgement.damping for judgement in tried if judgement.excess <= 1), None)
    text = (
        f"this removal cannot be trusted. It moves the model {amplification:.3g} times as far as fine-tuning did, "
        f"{judged.whole.felt:.3g} times where the removed data care (in the norm of their curvature), and "
        f"{judged.worst} {worst:.3g} times (‖θ̂ − θ_0‖ / ‖Σ |θ_t − θ_0|‖, on all entries); the quadratic model "
        f"behind it is not trusted beyond {WHOLE:g} times, or {GROUP:g} times in a layer. "
        f"{_advice(plan, judged, enough)}"
    )
    return [Note(text, Kind.UNTRUSTED, amplification=amplification, damping=enough)]


def _advice(plan: Plan, judged: Judgement, enough: float | None) -> str:
    rest = "estimate the base's curvature on more data, so that fewer of its entries are almost 0."
    # The step is linear in the strength, unless that also decides what is left of the base's curvature.
    if judged.excess <= 20 and not plan.inputs.options.get("base_saw_removed"):
        rest = f"lower the strength to {1 / judged.excess:.2g} of what it is, or {rest}"
    if plan.inputs.options["cap"] == "none":
        rest += " Without `cap: none`, no weight moves more than twice as far as under plain negation."
    if enough is None:
        return f"No damping up to {DAMPINGS[-1]:g} is enough: {rest}"
    return (
        f"Raise the damping from {judged.damping:g} to {enough:g}, the least power of ten that is enough for that, or "
        f"{rest} Either way, evaluate the result on data that stays."
    )


def judge(
    plan: Plan,
    dampings: Sequence[float],
    threads: int = 1,
    advance: Advance = lambda nbytes: None,
    spread: Spread | None = None,
) -> list[Judgement]:
    """The steps of a removal with each damping."""
    looked_at = sum(job.info.numel for job in plan.merged)
    judgements = [Judgement(damping, looked_at=looked_at) for damping in dampings]
    runs = [*chunks(plan.entrywise), *whole(plan.layers)]
    for part in (spread or here(threads))(plan, judge_part, runs, list(dampings), advance):
        for judgement, groups in zip(judgements, part, strict=True):
            for name, step in groups.items():
                judgement.groups.setdefault(name, Step()).add(step)
    return judgements


def judge_part(
    plan: Plan, runs: Sequence[Run], known: Sequence[float], threads: int, advance: Advance
) -> list[dict[str, Step]]:
    """For each damping that is known, the steps in some runs by layer group."""
    jobs, found = plan.by_name, [dict[str, Step]() for _ in known]
    lock = threading.Lock()

    def work(buffers: Buffers, run: Run) -> None:
        job, start, stop = jobs[run[0]], run[1], run[2]
        steps = list(_steps(plan, job, start, stop, buffers, known))
        with lock:
            for groups, step in zip(found, steps, strict=True):
                groups.setdefault(group_of(job.name), Step()).add(step)
            advance(plan.bytes_read(job) * (stop - start) // job.info.numel)

    run_parallel(runs, with_buffers(work), threads)
    return found


def _steps(plan: Plan, job: Job, start: int, stop: int, buffers: Buffers, dampings: Sequence[float]) -> Iterator[Step]:
    """In float64, so that a step that overflows in the merge is still a number here."""
    if job.layer is not None:
        yield from _layer_steps(plan, job, dampings)
        return
    wide = converted(read_block(plan, job, start, stop, buffers), Tensor.double)
    base, tuned = wide["base"], wide["tuned"]
    moved = sum((model - base).abs_() for model in tuned)
    squares, curvature = moved.square(), sum(wide["curvature"])
    tuning, felt = float(squares.sum()), float((squares * curvature).sum())
    for damping in dampings:
        arguments = rule_arguments(plan.rule, plan, wide, plan.inputs.settings.of(job.name)) | {"damping": damping}
        step = (plan.rule(**arguments) - base).square_()
        yield Step(float(step.sum()), tuning, float((step * curvature).sum()), felt)


def _layer_steps(plan: Plan, job: Job, dampings: Sequence[float]) -> Iterator[Step]:
    """The same for a layer with Kronecker curvature; what is felt is ⟨X, H X⟩."""
    tensors = read_layer(plan, job)
    base, moved = tensors["base"], [model - tensors["base"] for model in tensors["tuned"]]

    def felt(x: Tensor) -> float:
        return sum(float((applied(hessian, x) * x).sum()) for hessian in tensors["curvature"])

    tuning = float(sum(delta.abs() for delta in moved).square().sum())
    felt_tuning = sum(math.sqrt(max(0.0, felt(delta))) for delta in moved) ** 2
    for damping in dampings:
        step = solve_layer(plan, plan.rule, {**tensors, "damping": damping}, job.name) - base
        yield Step(float(step.square().sum()), tuning, max(0.0, felt(step)), felt_tuning)
