"""Sources of curvature during training: Adam's second moments, a running average, or a pass over the data."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from ..curvature.batches import IndexedBatches, examples_in
from ..curvature.checkpoint_names import is_adapted
from ..curvature.curvature import Curvature
from ..curvature.estimate import estimate_curvature, verify_formulas
from ..curvature.format import STEM
from ..curvature.from_optimizer import second_moment, token_note
from ..curvature.kernels import sum_type
from ..curvature.verify import Formulas
from ..distributed import initialized
from ..errors import GradmergeError, InputError
from .curvature_targets import CurvatureTargets

_log = logging.getLogger(__name__)
Batch = Mapping[str, Any]
#: The running average, saved in the curvature folder of a checkpoint so that training can resume.
RUNNING_AVERAGE = "online.safetensors"
_RUNNING_AVERAGE_FORMAT = "gradmerge-online/1"
#: Optimizers whose `exp_avg_sq` is a running mean of squared gradients.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
#: Keyword arguments that the Trainer adds to a batch.
_NOT_INPUTS = ("num_items_in_batch", "return_dict")


@dataclass(frozen=True)
class SourceOptions:
    """Arguments of CurvatureCallback."""

    every: int
    decay: float
    likelihood: str
    limit: int | None
    batch_size: int | None
    seed: int


@dataclass
class TrainingRun:
    """The training run that a callback follows."""

    args: Any
    targets: CurvatureTargets
    optimizer: Any
    loader: Any
    batch_size: int
    """Examples per optimizer step, over all processes and accumulated batches."""
    max_steps: int
    first_step: int
    """Optimizer steps before this run; more than 0 if it resumes."""

    @property
    def writes(self) -> bool:
        return bool(self.args.should_save)

    def examples(self, step: int) -> int:
        """Return the number of training examples; for a streamed dataset, those seen in ``step`` steps."""
        try:
            return len(self.loader.dataset)
        except TypeError:
            return step * self.batch_size

    def warn(self, text: str) -> None:
        if self.writes:
            _log.warning("CurvatureCallback: %s", text)

    def curvature(self, sums: Mapping[str, Tensor], examples: int, likelihood: str) -> Curvature | None:
        """Return the curvature with the names of files, in the process that writes it."""
        if not self.writes:
            return None
        name = Path(self.args.output_dir).resolve().name
        return Curvature(self.targets.to_stored(sums), examples, likelihood, name)


class CurvatureSource:
    """Follows a training run step by step, and returns the curvature at checkpoints and at the end."""

    def __init__(self, run: TrainingRun, options: SourceOptions) -> None:
        self.run, self.options = run, options

    def begin_step(self, step: int) -> None:
        """Handle the begin of optimizer step ``step``, counted from 1."""

    def before_update(self, step: int) -> None:
        """Handle a step whose gradients are complete and whose weights are not updated yet."""

    def logged(self, logs: Mapping[str, Any]) -> None:
        """Handle the logs of the Trainer."""

    def at_checkpoint(self, step: int) -> Curvature | None:
        """Return the curvature after ``step`` steps if it needs no pass over the data. All processes call this."""
        return None

    def at_end(self, step: int) -> Curvature | None:
        """Return the curvature of the trained model. All processes call this."""
        return self.at_checkpoint(step)

    def write_state(self, folder: Path, step: int) -> None:
        """Write what a resumed run needs."""

    def resume(self, folders: list[Path], step: int) -> None:
        """Read what an interrupted run wrote."""

    def close(self) -> None:
        """Remove hooks from the model."""


class AdamSource(CurvatureSource):
    """N·B·v̂ / s², with N examples, B examples per step, and v̂ from Adam's state.

    The optimizer's gradient is s times the mean gradient of a step's examples: s is 1 unless the Trainer adds up losses
    that it should average (see `loss_scale`).
    """

    def __init__(self, run: TrainingRun, options: SourceOptions) -> None:
        super().__init__(run, options)
        self._optimizer = _find_adam(run.optimizer)
        self._scale = 1
        self._max_norm = float(run.args.max_grad_norm or 0)
        several = run.args.gradient_accumulation_steps > 1 or initialized().world_size > 1
        self._recorder = BatchRecorder(run.targets.model) if several else None
        model: Any = run.targets.model
        for note in token_note(model.get_base_model() if is_adapted(model) else model):
            run.warn(note)

    def begin_step(self, step: int) -> None:
        if self._recorder is not None:
            self._recorder.active = True

    def before_update(self, step: int) -> None:
        if self._recorder is None:
            return
        batches = self._recorder.take()
        self.close()
        if batches:
            self._scale = loss_scale(self.run.args, self.run.targets.model, batches[0])
        else:
            self.run.warn(
                "torch_compile=True hides the model's inputs, so the callback cannot check whether the loss is a mean "
                "over all batches of a step. If it is a sum, this curvature is too large. Use source='pass', or a step "
                "of one batch."
            )

    def logged(self, logs: Mapping[str, Any]) -> None:
        norm = logs.get("grad_norm")
        if 0 < self._max_norm < (norm if isinstance(norm, int | float) else 0):
            self.run.warn(
                f"gradients are clipped to the norm {self._max_norm:g} (max_grad_norm), so the curvature from Adam's "
                "second moments is too small. Train with max_grad_norm=0, or use source='online' or 'pass'."
            )
            self._max_norm = 0.0

    def at_checkpoint(self, step: int) -> Curvature | None:
        examples = self.run.examples(step)
        factor = float(examples) * self.run.batch_size / self._scale**2
        moments = {
            parameter: moment.cpu()
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if (moment := second_moment(self._optimizer.state.get(parameter), group["betas"][1], factor)) is not None
        }
        if not moments:
            self.run.warn("the optimizer has not taken a step yet: no curvature is written")
            return None
        # A parameter without a state never had a gradient.
        sums = {name: moments.get(p, torch.zeros(p.shape)) for name, p in self.run.targets.parameters.items()}
        return self.run.curvature(sums, examples, "adam")

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None


class OnlineSource(CurvatureSource):
    """N·E, where E is a running average of the mean squared per-example gradient, over every ``every``-th step.

    E_k = decay·E_{k−1} + (1 − decay)·s_k / n_k with E_0 = 0, where s_k is the sum over the n_k examples of the k-th
    step used. The result is divided by 1 − decay^k.
    """

    def __init__(self, run: TrainingRun, options: SourceOptions) -> None:
        super().__init__(run, options)
        if run.max_steps < options.every:
            raise InputError(f"every={options.every}: training has only {run.max_steps} steps")
        if run.args.torch_compile:
            raise InputError("source='online' does not work with torch_compile=True. Use source='pass'.")
        self._average: dict[str, Tensor] = {}
        self._steps_used, self._examples_used = 0, 0
        self._recorder = BatchRecorder(run.targets.model)
        self._formulas: Formulas | None = None

    def begin_step(self, step: int) -> None:
        self._recorder.take()
        self._recorder.active = step % self.options.every == 0

    def before_update(self, step: int) -> None:
        if step % self.options.every:
            return
        batches, processes = self._recorder.take(), initialized()
        mine = sum(len(labels) for b in batches if isinstance(labels := b.get("labels"), Tensor))
        counts = processes.all_gather(mine)
        first = self._examples_used + sum(counts[: processes.rank])

        def compute() -> dict[str, Tensor]:
            if batches and (self._formulas is None or not self._formulas.conclusive):
                self._formulas = _verify(self.run.targets, batches[0])
            likelihood, seed = self.options.likelihood, self.options.seed
            sums = squared_gradients(self.run.targets, batches, likelihood, seed, first, self._formulas)
            if not bool(torch.stack([value.isfinite().all() for value in sums.values()]).all()):
                raise InputError("squared gradients are not finite")
            return sums

        try:
            sums = _sum_over_processes(compute)
        except GradmergeError as problem:
            # The first estimate raises. Later, a missing step is no reason to lose a training run.
            if not self._steps_used:
                self.close()
                raise
            _log.warning("CurvatureCallback: step %d is not in the running average: %s", step, problem)
            return
        self._steps_used += 1
        self._examples_used += sum(counts)
        if self.run.writes:
            weight = (1 - self.options.decay) / sum(counts)
            for name, value in sums.items():
                if name in self._average:
                    self._average[name].mul_(self.options.decay).add_(value, alpha=weight)
                else:
                    self._average[name] = value * weight

    def at_checkpoint(self, step: int) -> Curvature | None:
        if self._steps_used == 0:
            self.run.warn(f"no step was used yet (every={self.options.every}): no curvature is written")
            return None
        examples, decay = self.run.examples(step), self.options.decay
        weights = -math.expm1(self._steps_used * math.log(decay)) if decay > 0 else 1.0
        sums = {name: (value * (examples / weights)).cpu() for name, value in self._average.items()}
        return self.run.curvature(sums, examples, self.options.likelihood)

    def write_state(self, folder: Path, step: int) -> None:
        metadata = {"format": _RUNNING_AVERAGE_FORMAT, "step": step, "decay": self.options.decay}
        metadata |= {"steps": self._steps_used, "examples": self._examples_used}
        tensors = {name: value.detach().cpu().contiguous() for name, value in self._average.items()}
        # One key, because safetensors does not keep the order of several.
        save_file(tensors, folder / RUNNING_AVERAGE, metadata={"gradmerge": json.dumps(metadata)})

    def resume(self, folders: list[Path], step: int) -> None:
        paths = [path for folder in folders if (path := folder / STEM / RUNNING_AVERAGE).is_file()]
        if paths and self.run.writes:
            self._read_state(paths[0], step)
        if not paths and step >= self.options.every:
            self.run.warn(
                f"training resumes at step {step}, but there is no {RUNNING_AVERAGE} in "
                f"{' or '.join(str(f / STEM) for f in folders)}: the running average restarts. If the checkpoint is "
                "elsewhere, set resume_from_checkpoint in the TrainingArguments as well."
            )
        self._steps_used = max(initialized().all_gather(self._steps_used))
        self._examples_used = max(initialized().all_gather(self._examples_used))

    def _read_state(self, path: Path, step: int) -> None:
        remedy = "Remove the file to restart the average."
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads((file.metadata() or {}).get("gradmerge", "{}"))
                average = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            if metadata["format"] != _RUNNING_AVERAGE_FORMAT or metadata["step"] != step:
                raise InputError(f"{path}: not the running average of step {step}. {remedy}")
            self._steps_used, self._examples_used = int(metadata["steps"]), int(metadata["examples"])
            decay = float(metadata["decay"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{path}: cannot read the running average: {error}. {remedy}") from error
        if decay != self.options.decay:
            raise InputError(f"{path}: was averaged with decay={decay:g}, not {self.options.decay:g}. {remedy}")
        shapes = {name: parameter.shape for name, parameter in self.run.targets.parameters.items()}
        if {name: value.shape for name, value in average.items()} != shapes:
            raise InputError(f"{path}: is the running average of another model. {remedy}")
        self._average = {name: value.to(self.run.targets.device) for name, value in average.items()}

    def close(self) -> None:
        self._recorder.remove()


class PassSource(CurvatureSource):
    """Σ_i g_i² over the first ``limit`` training examples, at the final weights."""

    def __init__(self, run: TrainingRun, options: SourceOptions) -> None:
        super().__init__(run, options)
        data = run.loader.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise InputError("source='pass' needs a dataset with a length and an index. Use source='online'.")
        with preserved_random_state(run.targets.device):
            check_labels(run.loader.collate_fn([data[0]]))

    def at_end(self, step: int) -> Curvature | None:
        targets, options, args = self.run.targets, self.options, self.run.args
        data = self.run.loader.dataset
        total = len(data) if options.limit is None else min(options.limit, len(data))
        rows = initialized().share(total)

        def compute() -> dict[str, Tensor]:
            if not rows:
                return {n: torch.zeros_like(p, dtype=sum_type(p)).detach() for n, p in targets.parameters.items()}
            # Collators that draw random numbers draw the same ones every time.
            with preserved_random_state(targets.device):
                torch.manual_seed(options.seed)
                loader = DataLoader(
                    Subset(data, rows),
                    batch_size=options.batch_size or args.per_device_train_batch_size,
                    collate_fn=self.run.loader.collate_fn,
                    num_workers=args.dataloader_num_workers,
                )
                return squared_gradients(targets, loader, options.likelihood, options.seed, rows.start)

        return self.run.curvature(_sum_over_processes(compute), total, options.likelihood)


SOURCES: dict[str, type[CurvatureSource]] = {"adam": AdamSource, "online": OnlineSource, "pass": PassSource}


def squared_gradients(
    targets: CurvatureTargets,
    batches: Iterable[Batch],
    likelihood: str,
    seed: int,
    first: int,
    formulas: Formulas | None = None,
) -> dict[str, Tensor]:
    """Return Σ_i [∇ℓ_i]² over the examples of some batches, by names in memory.

    ``first`` is the index of the first example, which sampled labels depend on. Gradients, modes, hooks and random
    states are restored.
    """
    with _undisturbed(targets):

        def indexed_inputs() -> Iterator[tuple[int, Batch]]:
            index = first
            for batch in batches:
                yield index, _inputs(batch)
                index += examples_in(batch)

        options: Any = {"seed": seed, "device": targets.device, "formulas": formulas, "allow_empty": True}
        estimate: Curvature = estimate_curvature(targets.model, IndexedBatches(indexed_inputs), likelihood, **options)
        return estimate.sum()


def _verify(targets: CurvatureTargets, batch: Batch) -> Formulas:
    with _undisturbed(targets):
        return verify_formulas(targets.model, _inputs(batch), targets.device)


@contextlib.contextmanager
def _undisturbed(targets: CurvatureTargets) -> Iterator[None]:
    """Let only the targets require gradients; restore the model and all random states at the end."""
    model = targets.model
    with preserved_random_state(targets.device), preserved_modes(model), targets.only_these_require_gradients():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.training = False  # with the statistics of the batch, no example has its own gradient
        yield


def _inputs(batch: Batch) -> Batch:
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    check_labels(inputs)
    return inputs


def check_labels(inputs: Batch) -> None:
    """Raise InputError if a batch has no labels for the model's own loss."""
    if not isinstance(inputs.get("labels"), Tensor):
        raise InputError(
            f"CurvatureCallback: the model gets {', '.join(inputs)} but no 'labels', so the loss of an example is "
            "unknown. Name the label column `labels`, and do not use label smoothing or compute_loss_func, or use "
            "source='adam'."
        )


def _sum_over_processes(compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Add up the sums of all processes. If one process fails, all of them raise."""
    sums: dict[str, Tensor] = {}
    problem: GradmergeError | None = None
    try:
        sums = compute()
    except GradmergeError as error:
        problem = error
    if any(initialized().all_gather(problem is not None)):
        raise problem or InputError("another process failed on its examples")
    initialized().all_reduce(sums.values())
    return sums


def _find_adam(optimizer: Any) -> torch.optim.Optimizer:
    inner = optimizer
    while not isinstance(inner, _ADAMS) and isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, _ADAMS):
        raise InputError(
            "source='adam' needs PyTorch's Adam or AdamW (optim='adamw_torch' or 'adamw_torch_fused', or "
            f"gm.PriorAdamW), not {type(inner).__module__}.{type(inner).__name__}. Use source='online' or 'pass'."
        )
    return inner


def loss_scale(args: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    """Return s: the optimizer's gradient is s times the mean gradient of a step's examples.

    The Trainer adds up the losses of accumulated batches and of processes. It expects the model to divide each loss by
    `num_items_in_batch`, the number of labels in the whole step. A model that divides by the number in its own batch
    makes the sum too large by the number of batches; such a model returns the same loss for any `num_items_in_batch`.
    """
    items = batch.get("num_items_in_batch")
    if items is None or "labels" not in batch:
        return 1
    device = next(model.parameters()).device
    with preserved_random_state(device), preserved_modes(model), torch.no_grad():
        model.eval()
        one, two = (_loss(model(**batch | {"num_items_in_batch": n})) for n in (items, 2 * items))
    if one is None or two is None or abs(one - two) > 1e-3 * abs(one):
        return 1
    world_size = initialized().world_size if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps) * world_size


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


@contextlib.contextmanager
def preserved_random_state(device: torch.device) -> Iterator[None]:
    """Restore the states of all random number generators at the end."""
    devices = [] if device.type == "cpu" else [device]
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        yield


@contextlib.contextmanager
def preserved_modes(model: nn.Module) -> Iterator[None]:
    """Restore training or evaluation mode of every module at the end."""
    with contextlib.ExitStack() as stack:
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        yield


class BatchRecorder:
    """Records the inputs of a model in training mode while ``active`` is set."""

    def __init__(self, model: nn.Module) -> None:
        self._batches: list[dict[str, Any]] = []
        self.active = False
        self._handle = model.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.active and model.training and torch.is_grad_enabled():
            self._batches.append(dict(kwargs))

    def take(self) -> list[dict[str, Any]]:
        """Return the batches since the last call, and stop recording."""
        batches, self._batches, self.active = self._batches, [], False
        return batches

    def remove(self) -> None:
        self._handle.remove()
        self.take()
