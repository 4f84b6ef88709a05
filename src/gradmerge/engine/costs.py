"""What a merge costs: bytes, memory and seconds, from its plan and from rates. Arithmetic, no file is read here.

The files lie on one storage. A single node may have it as its own disk; several nodes share it, as a file system or an
object store, and then every byte that is read or written crosses the connection of some node once. The work is cut
evenly, into many more shares than there are workers. Reading, writing and arithmetic overlap, so that a pass takes as
long as the slowest of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ..curvature.needs import Rate
from ..errors import InputError
from ..rules.measures import Ranked
from .plan import Job, Plan
from .statistics import SAMPLE_FROM

#: Passes in which a threshold is found without a good guess: 16 bits of its place in each.
RANKING_PASSES = {torch.float32: 2, torch.float64: 4}
#: Seconds until the first tensor is read: Python and PyTorch, and on several nodes Ray's processes besides.
START, CLUSTER_START = 1.0, 10.0


@dataclass(frozen=True)
class Speeds:
    """What a cluster is assumed to do in a second."""

    disk: Rate
    """Bytes that the storage reads or writes, for all nodes together."""
    network: Rate | None
    """Bytes through the connection of one node; None where no file is reached through a network."""
    entries: Rate
    """Entries of the result that one worker process merges."""
    statistics: Rate | None = None
    """Entries that one worker goes through in a pass for statistics."""
    solving: Rate | None = None
    """Multiplications of matrices that one worker does where layers are solved whole."""


@dataclass(frozen=True)
class Pass:
    """One time over the inputs."""

    what: str
    read: int
    written: int
    entries: int
    """Of the result, that are gone through one by one."""
    products: float = 0.0
    """Multiplications in matrices that are solved whole."""


@dataclass(frozen=True)
class MergeCost:
    """What a merge needs, and how long it takes."""

    nodes: int
    workers: int
    """Processes on all nodes together."""
    passes: list[Pass]
    memory: int
    """Bytes of one worker process at its peak."""
    disk: int
    """Bytes that must be free where the result is staged."""
    network: int
    """Bytes over all connections."""
    seconds: dict[str, float]
    """Of the start, and of disk, network and cpu, as if each were alone; and the total."""
    limit: str
    """Which of the three takes longest."""
    speeds: Speeds

    @property
    def read(self) -> int:
        return sum(one.read for one in self.passes)

    @property
    def written(self) -> int:
        return sum(one.written for one in self.passes)

    def to_json(self) -> dict[str, Any]:
        """For machines: sizes in bytes, rates by the second."""
        return {
            "nodes": self.nodes,
            "workers": self.workers,
            "passes": [asdict(one) for one in self.passes],
            "bytes_disk": self.disk,
            "bytes_network": self.network,
            "rates": {name: rate for name, rate in asdict(self.speeds).items() if rate is not None},
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "limit": self.limit,
        }


def passes_of(
    plan: Plan, guessed: Collection[str] = (), adapter: bool = False, damping: int | None = None
) -> list[Pass]:
    """Every time that a merge goes over its inputs.

    ``guessed`` are tensors whose thresholds a sample tells ("" for the whole model), so that the merge itself counts
    whether they are right, and no other pass is taken for them. ``adapter``: what changes is factored, and its size
    not known before. ``damping``: bytes that are read to find the damping, if the plan knows it by now.
    """
    merged = plan.merged
    inputs, entries = sum(plan.bytes_read(job) for job in merged), sum(job.info.numel for job in merged)
    damping = plan.damping_read if damping is None else damping
    passes = [Pass("damping", damping, 0, entries)] if damping else []
    wide = any(job.compute == torch.float64 for job in merged)
    ranking = RANKING_PASSES[torch.float64 if wide else torch.float32]
    left = [] if "" in guessed else [job for job in merged if job.name not in guessed]
    if "thresholds" in plan.needs and left:
        # Where a sample brackets them, one pass is mostly enough.
        bracketed = plan.inputs.options["scope"] != "model" or (entries > SAMPLE_FROM and not wide)
        one = Pass("thresholds", sum(map(plan.bytes_read, left)), 0, sum(job.info.numel for job in left))
        passes += [one] * (1 if bracketed else ranking)
    for name, measure in plan.measures.items():
        passes += [Pass(name, inputs, 0, entries)] * (ranking if isinstance(measure, Ranked) else 1)
    solved = [job for job in merged if job.whole or (adapter and len(job.info.shape) > 1)]
    passes.append(
        Pass(
            "merge",
            plan.total_read,
            0 if adapter else plan.total_written,
            sum(job.info.numel for job in plan.jobs if not job.whole),
            sum(map(products_of, solved)),
        )
    )
    again = sum(_models_read(plan, job) for job in merged if plan.cut_otherwise(job))
    return passes + ([Pass("digests", again, 0, 0)] if again else [])


def _models_read(plan: Plan, job: Job) -> int:
    """Bytes of the models alone, which are digested apart where blocks are not those of a digest."""
    pieces = [job, *([job.layer.bias] if job.layer and job.layer.bias else [])]
    base = (
        [plan.inputs.base] if plan.inputs.base and "base" in plan.needs and not (job.solved and not job.layer) else []
    )
    read = [(c, piece.name) for piece in pieces for c in (*base, *plan.inputs.tuned_of(piece.name))]
    return sum(c.tensors[plan.inputs.stored_name(c, name)].nbytes for c, name in read)


def products_of(job: Job) -> float:
    """Multiplications of an (out × in) matrix with square ones of its sides, and of those with themselves.

    What solves it takes some multiple of this; which one is measured.
    """
    rows = job.info.shape[0] if job.info.shape else 1
    columns = job.info.numel // max(1, rows)
    return float(rows) * columns * (rows + columns) + float(rows) ** 3 + float(columns) ** 3


def cost_of(
    plan: Plan,
    speeds: Speeds,
    *,
    nodes: int = 1,
    workers: int = 1,
    threads: int = 1,
    away: tuple[float, float] = (0.0, 0.0),
    guessed: Collection[str] = (),
    beside: int = 0,
    adapter: bool = False,
    damping: int | None = None,
) -> MergeCost:
    """The cost of a merge.

    ``away`` are the shares of what is read and of what is written that cross a network, ``beside`` the bytes of small
    files that are written with the weights; ``guessed``, ``adapter`` and ``damping`` are as of
    :func:`passes_of`.
    """
    passes = passes_of(plan, guessed, adapter, damping)
    parts = [seconds_of(one, speeds, nodes, workers, away) for one in passes]
    seconds = {name: sum(part[name] for part in parts) for name in ("disk", "network", "cpu")}
    start = START if nodes == workers == 1 else CLUSTER_START
    return MergeCost(
        nodes=nodes,
        workers=workers,
        passes=passes,
        memory=plan.memory(threads),
        disk=0 if adapter else plan.total_written + beside,
        network=round(sum(over_network(one, away) for one in passes)),
        seconds={"start": start, **seconds, "total": start + sum(max(part.values()) for part in parts)},
        limit=max(seconds, key=lambda name: seconds[name]),
        speeds=speeds,
    )


def over_network(one: Pass, away: tuple[float, float]) -> float:
    """Bytes of a pass that cross a network."""
    return one.read * away[0] + one.written * away[1]


def seconds_of(one: Pass, speeds: Speeds, nodes: int, workers: int, away: tuple[float, float]) -> dict[str, float]:
    """How long the disk, the network and the processors take for a pass, each as if it were alone."""
    rate = speeds.entries if one.what == "merge" or speeds.statistics is None else speeds.statistics
    cpu = one.entries / rate.amount + (one.products / speeds.solving.amount if speeds.solving else 0.0)
    return {
        "disk": (one.read + one.written) / speeds.disk.amount,
        "network": over_network(one, away) / speeds.network.amount / nodes if speeds.network else 0.0,
        "cpu": cpu / workers,
    }


def checked_rate(option: str, value: float | None, unit: str = "GB/s") -> Rate | None:
    """A rate that a user gives, in units of 10⁹ a second."""
    if value is None:
        return None
    if not 0 < value < float("inf"):
        raise InputError(f"--{option} {value:g}: a rate in {unit}, more than 0")
    return Rate(value * 1e9, "given")
