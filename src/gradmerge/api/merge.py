"""Merge checkpoints from disk to disk.

Heavy modules are imported in the functions: the command line reads the signature of :func:`merge` without PyTorch.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..arguments import checked
from ..errors import InputError
from ..progress import Progress, shown
from ..urls import output_path

if TYPE_CHECKING:
    from ..engine.executor import Executor
    from ..engine.on_ray import RayCluster
    from ..engine.plan import Plan
    from ..engine.run import MergeResult
    from ..recipe import Recipe

    RecipeLike = str | Path | Recipe | Mapping[str, Any]
    """A recipe file, a mapping with the keys of a recipe, or a :class:`Recipe`."""


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
    engine: Literal["local", "ray"] = "local",
    workers: int | None = None,
    ray_address: str | None = None,
    progress: bool | Progress = True,
    block: int | None = None,
) -> MergeResult:
    """Merge the checkpoints of a recipe and write the result to the folder ``out``.

    The merge streams: its memory depends on the number of models and threads, not on the size of the models. The bytes
    of the weights depend only on the inputs and the recipe.

    Args:
        recipe: A recipe file (of gradmerge or mergekit), a mapping with its keys, or a :class:`Recipe`.
        out: A new folder, or an fsspec URL such as s3://bucket/name. The folder appears when it is complete; until then
            files are in ``OUT.gradmerge-partial``. A result at a URL is complete when its gradmerge.json exists.
        threads: Threads; by default one per core, at most 4.
        device: Device of the arithmetic: cpu, cuda, cuda:1, …
        force: Replace the output if gradmerge wrote it, or if it is empty.
        resume: Resume a merge that was killed; the result has the same bytes.
        allow_pickle: Also read .bin and .pt files (tensors only, no code).
        allow_config: Accept that the models' configs differ in these keys, as the error names them.
        dequantize: Dequantize the weights of fp8 and bitsandbytes models on load.
        allow_code: Run the Python file that the recipe names as its method (``method: ./my_rule.py``).
        allow_nonfinite: Continue if weights are NaN or infinite.
        accept_untrusted: Write a removal even if its step is too long to be trusted.
        engine: Execution backend: ``local``, or ``ray`` for the workers of a Ray cluster, with the same bytes. All
            machines of the cluster must have the inputs and the output under the same paths.
        workers: With Ray, the number of workers, each with ``threads`` threads; by default as many as the cluster has
            room for.
        ray_address: HOST:PORT of a Ray cluster, or ``auto`` for the one on this machine. Default: RAY_ADDRESS in the
            environment, else a new cluster on this machine.
        progress: Show a progress bar on a terminal or in a notebook; False for none; or an object with
            ``begin(what, total, done)`` and ``advance(amount)``, which gets the progress in bytes.
        block: Elements per call of the rule. The weights do not depend on it.

    Returns:
        Counts, sizes and times of the merge, and its notes.

    >>> merge({"method": "ties", "base": "./base", "models": ["./a", "./b"]}, "./merged").merged  # doctest: +SKIP
    148
    """
    import torch

    from ..engine.executor import LocalExecutor, allow_many_files
    from ..engine.run import merge_to_folder

    recipe = as_recipe(recipe, allow_code)
    out = output_path(out)
    if out.suffix == ".safetensors":
        raise InputError(f"{out}: the result is a folder; give a name without .safetensors")
    check_device(device)
    allow_many_files()
    reading: dict[str, Any] = {"allow_pickle": allow_pickle, "allow_config": allow_config, "dequantize": dequantize}
    executor: Executor
    if engine == "ray":
        executor = _ray_cluster(recipe, device, workers, threads, ray_address, reading)
    else:
        for name, value in (("workers", workers), ("ray_address", ray_address)):
            if value is not None:
                raise InputError(f"{name}: applies only with engine='ray'")
        executor = LocalExecutor(number_of_threads(threads))
    with executor, shown(progress) as bar:

        def run(recipe: Recipe, out: Path, force: bool = False) -> MergeResult:
            with planned(recipe, **reading) as plan:
                plan.block = block or plan.block
                plan.device, plan.allow_nonfinite = torch.device(device), allow_nonfinite
                return merge_to_folder(
                    plan,
                    out,
                    executor=executor,
                    force=force,
                    resume=resume,
                    accept_untrusted=accept_untrusted,
                    progress=bar,
                )

        with _merge_named_recipes(recipe, out, run, resume=resume) as ready:
            return run(ready, out, force)


def as_recipe(recipe: RecipeLike, allow_code: bool = False) -> Recipe:
    """Return the recipe of a file or a mapping, or the recipe itself."""
    from ..recipe import Recipe, load_recipe, make_recipe

    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return make_recipe(recipe, allow_code=allow_code)
    return load_recipe(recipe, allow_code=allow_code)


def recipe_without_slices(recipe: RecipeLike, command: str, allow_code: bool = False) -> Recipe:
    """Return the recipe; raise if it has slices, which ``command`` does not support."""
    loaded = as_recipe(recipe, allow_code)
    if loaded.slices:
        raise InputError(f"slices: {command} does not support them. Merge the recipe and evaluate the result")
    return loaded


@contextlib.contextmanager
def planned(recipe: RecipeLike, **reading: Any) -> Iterator[Plan]:
    """Open the plan of a recipe, and close its inputs at the end.

    ``reading`` are the keywords of :func:`gradmerge.engine.plan.open_plan`.
    """
    from ..engine.plan import open_plan

    recipe = as_recipe(recipe)
    if recipe.merges and not recipe.merged_folders:
        raise InputError(
            f"{next(iter(recipe.merges))}: merge this named recipe first, and use the resulting folder instead"
        )
    plan = open_plan(recipe, **reading)
    with contextlib.closing(plan.inputs):
        yield plan


def merge_named_recipes(
    recipe: Recipe, out: str | Path | None, threads: int | None, reading: Mapping[str, Any]
) -> AbstractContextManager[Recipe]:
    """Merge the named recipes that a recipe uses into a temporary folder, and yield the recipe that reads the results.

    It is for previews and diagnoses. ``out`` is the folder of the report; the temporary folder lies beside it.
    """

    def run(named: Recipe, folder: Path) -> MergeResult:
        return merge(named, folder, progress=False, threads=threads, **reading)

    return _merge_named_recipes(recipe, None if out is None else output_path(out), run)


@contextlib.contextmanager
def _merge_named_recipes(
    recipe: Recipe, out: Path | None, run: Callable[[Recipe, Path], MergeResult], *, resume: bool = False
) -> Iterator[Recipe]:
    """Merge the named recipes with ``run`` into a temporary folder beside OUT, and yield the recipe that reads them.

    With ``resume`` it resumes unfinished merges in that folder, and an error keeps the folder.
    """
    if not recipe.merges or recipe.merged_folders:
        yield recipe
        return
    from ..engine.input_state import recipe_paths
    from ..io.atomic_dir import AtomicDir

    with contextlib.ExitStack() as stack:
        if out is None:
            out = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradmerge-"))) / "out"
        reads = [path for named in recipe.merges.values() for path in recipe_paths(named)]
        staging = AtomicDir(out.with_name(f"{out.name}.named"), "named merges", resume=resume, reads=reads)
        stack.enter_context(staging)
        staging.keep, staging.temporary = resume, True
        merged_folders: dict[str, Path] = {}
        notes = list(recipe.notes)
        for number, (name, named) in enumerate(recipe.merges.items(), 1):
            folder = staging.folder / f"{number}"
            notes += run(named.with_merged_folders(merged_folders), folder).notes
            merged_folders[name] = folder
        yield recipe.with_merged_folders(merged_folders, notes)


def _ray_cluster(
    recipe: Recipe,
    device: str,
    workers: int | None,
    threads: int | None,
    address: str | None,
    reading: dict[str, Any],
) -> RayCluster:
    """Return the cluster of a merge, which is not started yet."""
    from ..engine.on_ray import RayCluster

    for name, number in (("workers", workers), ("threads", threads)):
        check_count(name, number)
    if device != "cpu":
        raise InputError(f"device {device!r}: Ray workers compute on the cpu; use engine='local' for a GPU")
    if "adapter" in {each.output.format for each in (recipe, *recipe.merges.values())}:
        raise InputError("output.format: only engine='local' writes adapters")
    return RayCluster(workers, threads, address, reading)


def check_count(name: str, number: int | None) -> None:
    """Raise InputError unless a number of threads or workers is from 1 to 256; None means the default."""
    if number is not None and not 1 <= number <= 256:
        raise InputError(f"{name} {number}: must be from 1 to 256")


def check_device(device: str) -> None:
    """Raise InputError unless a merge can run on this device."""
    import torch

    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError:
        kind, index = "", 0
    if kind != "cpu" and (kind != "cuda" or index >= torch.cuda.device_count()):
        raise InputError(f"device {device!r}: merges run on cpu, or on a CUDA device such as cuda:1 that PyTorch finds")


def number_of_threads(threads: int | None) -> int:
    """Return the number of threads. The default is one per core, at most 4: more would wait for the GIL."""
    from ..engine.executor import available_cores

    check_count("threads", threads)
    return threads or min(available_cores(), 4)
