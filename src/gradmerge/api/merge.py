"""Merging from disk to disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..arguments import checked
from ..engine.adapter.to_adapter import merge_to_adapter
from ..engine.plan.build import open_plan
from ..engine.plan.plan import BLOCK, Plan
from ..engine.run.merge import MergeResult, merge_to_folder
from ..engine.thread_pool import allow_many_files
from ..errors import InputError
from ..progress import Progress, shown
from ..recipe import Recipe, load_recipe, make_recipe
from ..text import nearest
from ..urls import output_path
from .named_merges import with_named_merges, with_stand_ins

if TYPE_CHECKING:
    from ..engine.ray.cluster import RayCluster


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads() -> int:
    return min(cores(), 4)  # more wait for one another at the interpreter's lock


def as_recipe(recipe: str | Path | Recipe | Mapping[str, Any], allow_code: bool = False) -> Recipe:
    """A recipe from a file, a mapping, or itself."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return make_recipe(recipe, allow_code=allow_code)
    return load_recipe(recipe, allow_code=allow_code)


def recipe_of_models(recipe: str | Path | Recipe | Mapping[str, Any], who: str, allow_code: bool = False) -> Recipe:
    """The same, for those who look at merges of whole models."""
    found = as_recipe(recipe, allow_code)
    if found.slices:
        advice = "Merge it, and look at the result with `gradmerge evaluate`"
        raise InputError(f"slices: {who} looks at merges of whole models, not at stacked layers. {advice}.")
    return found


@contextlib.contextmanager
def planned(recipe: str | Path | Recipe | Mapping[str, Any], **allowed: Any) -> Iterator[Plan]:
    """The plan of a recipe, with its inputs open. Named recipes whose results are not there are only looked at.

    ``allowed`` is as of :func:`gradmerge.engine.plan.build.open_plan`.
    """
    plan = open_plan(with_stand_ins(as_recipe(recipe)), **allowed)
    with contextlib.closing(plan.inputs):
        yield plan


@checked()
def merge(
    recipe: str | Path | Recipe | Mapping[str, Any],
    out: str | Path,
    *,
    threads: int | None = None,
    device: str = "cpu",
    force: bool = False,
    resume: bool = False,
    allow_pickle: bool = False,
    allow_config: Sequence[str] = (),
    dequantize: bool = False,
    allow_code: bool = False,
    allow_nonfinite: bool = False,
    accept_untrusted: bool = False,
    engine: str = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: bool | Progress = True,
    block: int = BLOCK,
) -> MergeResult:
    """Merge checkpoints as a recipe says and write the result to the folder ``out``.

    Everything is streamed: memory depends on the number of models and threads, not on their size. The bytes of the
    weights depend on the inputs and the recipe alone.

    Args:
        recipe: A recipe file, of ours or of mergekit's, a mapping with its keys, or a :class:`Recipe`.
        out: A new folder. It appears when it is complete; until then the work is in ``OUT.gradmerge-partial``. Or a
            URL of fsspec, such as s3://bucket/name: it is complete when its gradmerge.json is there.
        threads: By default one per core, at most 4. On Ray, of each worker.
        device: Where the arithmetic is done: cpu, cuda, cuda:1, …
        force: Replace ``out`` if gradmerge wrote it, or it is empty.
        resume: Go on with a merge that was killed.
        allow_pickle: Also read .bin and .pt checkpoints, of which only the tensors are taken.
        allow_config: Keys in which configs may differ although they make another function of the weights.
        dequantize: Read quantised models (fp8 with scales, bitsandbytes) as the numbers that their codes stand for.
        allow_code: Run the Python file that the recipe names as its method (``method: ./my_rule.py``).
        allow_nonfinite: Go on when weights are NaN or infinite.
        accept_untrusted: Write a removal although its step is too long to be trusted.
        engine: ``local``, or ``ray`` to have workers of a Ray cluster share the work, with the same bytes in the end.
            Inputs and ``out`` are then on file systems that all machines of the cluster have under the same paths.
        workers: On Ray, how many; by default as many as the cluster has room for.
        ray_address: HOST:PORT of a Ray cluster, or ``auto`` for one that runs on this machine. By default what the
            environment says (RAY_ADDRESS), and else a cluster of its own is started here for as long as the merge runs.
            One that this process is connected to already is used as it is.
        progress: A bar on long work, on a terminal or in a notebook; False for none; or what is told how far the merge
            is, in bytes: an object with ``begin(what, total, done)`` and ``advance(amount)``.
        block: Elements that go through the rule at once; the weights do not depend on it.

    Returns:
        What was done, with notes on what should be known of it.

    >>> merge({"method": "ties", "base": "./base", "models": ["./a", "./b"]}, "./merged").merged  # doctest: +SKIP
    148
    """
    recipe = as_recipe(recipe, allow_code)
    out = output_path(out)
    if out.suffix == ".safetensors":
        raise InputError(f"{out}: the result is a folder; give a name without .safetensors")
    cluster = _cluster(recipe, engine, workers, ray_address, threads, device)
    check_device(device)
    allow_many_files()
    settings: dict[str, Any] = {
        "threads": threads or default_threads(),
        "device": device,
        "resume": resume,
        "allow_nonfinite": allow_nonfinite,
        "accept_untrusted": accept_untrusted,
    }
    allowed: dict[str, Any] = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    with contextlib.ExitStack() as stack:
        told = stack.enter_context(shown(progress))
        if cluster is not None:
            cluster.allowed = allowed
            settings["cluster"] = stack.enter_context(cluster)

        def run(recipe: Recipe, out: Path, force: bool = False) -> MergeResult:
            with planned(recipe, **allowed) as plan:
                plan.block = block
                write = merge_to_adapter if recipe.output.format == "adapter" else merge_to_folder
                return write(recipe, plan, out, force=force, progress=told, **settings)

        ready = stack.enter_context(with_named_merges(recipe, out, run, resume=resume))
        return run(ready, out, force)


def _cluster(
    recipe: Recipe, engine: str, workers: int | None, address: str | None, threads: int | None, device: str
) -> RayCluster | None:
    """The cluster that a merge runs on, not yet started; None for this process alone."""
    if engine == "local":
        if workers is not None or address is not None:
            raise InputError(f"{'--ray-address' if workers is None else '--workers'} goes with --engine ray")
        return None
    if engine != "ray":
        raise InputError(f"engine {engine!r}: known are local and ray{nearest(engine, ('local', 'ray'))}")
    if workers is not None and workers < 1:
        raise InputError(f"workers {workers}: at least one is needed")
    if device != "cpu":
        raise InputError(f"device {device!r}: workers on Ray compute on the cpu; with a GPU, merge with --engine local")
    if "adapter" in {one.output.format for one in (recipe, *recipe.merges.values())}:
        raise InputError("output.format: an adapter is written by --engine local alone; it is small")
    from ..engine.ray.cluster import RayCluster

    return RayCluster(workers, threads, address)


def merged_first(
    recipe: Recipe, out: str | Path | None, threads: int | None, allowed: Mapping[str, Any]
) -> AbstractContextManager[Recipe]:
    """A recipe whose named recipes have been merged, for those who look at merges and write OUT."""

    def make(one: Recipe, folder: Path) -> MergeResult:
        return merge(one, folder, progress=False, threads=threads, **allowed)

    return with_named_merges(recipe, None if out is None else output_path(out), make)


def check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise InputError(f"device {device!r}: not a device such as cpu, cuda or cuda:1") from None
    if kind == "cuda" and (torch.device(device).index or 0) >= torch.cuda.device_count():
        raise InputError(f"device {device!r}: this machine has no such CUDA device that PyTorch can use; take cpu")
    if kind not in ("cpu", "cuda"):
        raise InputError(f"device {device!r}: merges run on cpu or cuda")
