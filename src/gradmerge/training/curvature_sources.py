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
from ..curvature.checkpoint_names import adapter_names, is_adapted, stored_shapes, stored_tensors
from ..curvature.curvature import Curvature
from ..curvature.estimate import estimate_curvature, verify_formulas
from ..curvature.format import STEM
from ..curvature.from_optimizer import second_moment, token_note
from ..curvature.kernels import sum_type
from ..curvature.verify import Formulas
from ..distributed import initialized
from ..errors import GradmergeError, InputError
from ..text import listed

_log = logging.getLogger(__name__)
Batch = Mapping[str, Any]
#: The running average, saved in the curvature folder of a checkpoint so that training can resume.
RUNNING_AVERAGE = "online.safetensors"
#: Optimizers whose `exp_avg_sq` is a running mean of squared gradients.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
#: Keyword arguments that the Trainer adds to a batch.
_NOT_INPUTS = ("num_items_in_batch", "return_dict")


@dataclass(frozen=True)
class SourceOptions:
    """Arguments of CurvatureCallback."""

    every: int = 10
    decay: float = 0.99
    likelihood: str = "empirical"
    limit: int | None = None
    batch_size: int | None = None
    seed: int = 0


class CurvatureSource:
    """Follows a training run step by step, and returns the curvature at checkpoints and at the end."""

    def __init__(self, options: SourceOptions, args: Any, state: Any, model: nn.Module, optimizer: Any, loader: Any):
        self.options, self.args, self.model, self.optimizer, self.loader = options, args, model, optimizer, loader
        self.first_step: int = state.global_step
        """Optimizer steps before this run; more than 0 if it resumes."""
        batch_size = (state.train_batch_size if args.auto_find_batch_size else None) or args.train_batch_size
        self.batch_size = int(batch_size * args.gradient_accumulation_steps * args.world_size)
        """Examples per optimizer step, over all processes and accumulated batches."""
        self._adapter_names = adapter_names(model) if is_adapted(model) else None
        self.parameters: dict[str, nn.Parameter] = {
            name: p
            for name, p in model.named_parameters()
            if p.requires_grad
            and p.is_floating_point()
            and (self._adapter_names is None or name in self._adapter_names)
        }
        """The trained parameters, by name in memory; of a PEFT model, those that its adapter file holds."""
        if not self.parameters:
            raise InputError("no parameter of the model is trained (requires_grad=False for all)")
        self.device = next(iter(self.parameters.values())).device
        # Raise before training, not after it, if the names of files cannot be determined.
        stored = self._to_stored({n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in self._named()})
        if self._adapter_names is not None:
            self.warn(
                "this is the curvature of the adapter's own tensors. To merge the full weights, run `gradmerge "
                "curvature estimate` on the saved adapter."
            )
        elif missing := [name for name in stored_shapes(model) if name not in stored]:
            self.warn(
                f"{len(missing)} parameters are not trained and get no curvature. A recipe that uses it needs "
                f"`missing: zero`, or must exclude them:\n{listed(missing, 4)}"
            )

    def begin_step(self, step: int) -> None:
        """Handle the begin of optimizer step ``step``, counted from 1."""

    def before_update(self, step: int) -> None:
        """Handle a step whose gradients are complete and whose weights are not updated yet."""

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

    def examples(self, step: int) -> int:
        """Return the number of training examples; for a streamed dataset, those seen in ``step`` steps."""
        try:
            return len(self.loader.dataset)
        except TypeError:
            return step * self.batch_size

    def warn(self, text: str) -> None:
        if self.args.should_save:
            _log.warning("CurvatureCallback: %s", text)

    def curvature(self, sums: Mapping[str, Tensor], examples: int, likelihood: str) -> Curvature | None:
        """Return the curvature with the names of files, in the process that writes it."""
        if not self.args.should_save:
            return None
        return Curvature(self._to_stored(sums), examples, likelihood, Path(self.args.output_dir).resolve().name)

    def _named(self) -> Iterable[tuple[str, nn.Parameter]]:
        return self.parameters.items()

    def _to_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the names and shapes of the checkpoint's files."""
        if self._adapter_names is None:
            return stored_tensors(self.model, tensors)
        return {self._adapter_names[name]: value for name, value in tensors.items()}

    def squared_gradients(
        self, batches: Iterable[Batch], first: int, formulas: Formulas | None = None
    ) -> dict[str, Tensor]:
        """Return Σ_i [∇ℓ_i]² over the examples of some batches, by names in memory.

        ``first`` is the index of the first example, which sampled labels depend on.
        """

        def indexed_inputs() -> Iterator[tuple[int, Batch]]:
            index = first
            for batch in batches:
                yield index, model_inputs(batch)
                index += examples_in(batch)

        options: Any = {"seed": self.options.seed, "device": self.device, "formulas": formulas, "allow_empty": True}
        with evaluation_mode(self.model, self.device):
            estimate: Any = estimate_curvature(
                self.model, IndexedBatches(indexed_inputs), self.options.likelihood, **options
            )
        return {name: value for name, value in estimate.sum().items() if name in self.parameters}


class AdamSource(CurvatureSource):
    """N·B·v̂ / s², with N examples, B examples per step, and v̂ from Adam's state.

    The optimizer's gradient is s times the mean gradient of a step's examples: s is 1 unless the Trainer adds up losses
    that it should average (see `loss_scale`).
    """

    def __init__(self, options: SourceOptions, args: Any, *run: Any) -> None:
        super().__init__(options, args, *run)
        while not isinstance(self.optimizer, _ADAMS) and hasattr(self.optimizer, "optimizer"):
            self.optimizer = self.optimizer.optimizer
        if not isinstance(self.optimizer, _ADAMS):
            raise InputError(
                "source='adam' needs PyTorch's Adam or AdamW (optim='adamw_torch' or 'adamw_torch_fused', or "
                f"gm.PriorAdamW), not {type(self.optimizer).__name__}. Use source='online' or 'pass'."
            )
        several = args.gradient_accumulation_steps > 1 or initialized().world_size > 1
        if several and args.torch_compile:
            raise InputError(
                "source='adam' does not work with torch_compile=True and several batches per step. Use source='pass'."
            )
        self._scale = 1
        self._recorder = BatchRecorder(self.model) if several else None
        if args.max_grad_norm:
            self.warn(
                f"max_grad_norm={args.max_grad_norm:g}: where gradients are clipped, Adam's second moments are too "
                "small. Train with max_grad_norm=0, or use source='online' or 'pass'."
            )
        for note in token_note(self.model.get_base_model() if is_adapted(self.model) else self.model):  # type: ignore[operator]
            self.warn(note)

    def begin_step(self, step: int) -> None:
        if self._recorder is not None:
            self._recorder.active = True

    def before_update(self, step: int) -> None:
        if self._recorder is not None:
            if batches := self._recorder.take():
                self._scale = loss_scale(self.args, self.model, batches[0])
            self.close()

    def at_checkpoint(self, step: int) -> Curvature | None:
        examples = self.examples(step)
        factor = float(examples) * self.batch_size / self._scale**2
        moments = {
            parameter: moment.cpu()
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if (moment := second_moment(self.optimizer.state.get(parameter), group["betas"][1], factor)) is not None
        }
        if not moments:
            self.warn("the optimizer has not taken a step yet: no curvature is written")
            return None
        # A parameter without a state never had a gradient.
        sums = {name: moments.get(p, torch.zeros(p.shape)) for name, p in self.parameters.items()}
        return self.curvature(sums, examples, "adam")

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.remove()
            self._recorder = None


class OnlineSource(CurvatureSource):
    """N·E, where E is a running average of the mean squared per-example gradient, over every ``every``-th step.

    E_k = decay·E_{k−1} + (1 − decay)·s_k / n_k with E_0 = 0, where s_k is the sum over the n_k examples of the k-th
    step used. The result is divided by 1 − decay^k.
    """

    def __init__(self, options: SourceOptions, args: Any, state: Any, *run: Any) -> None:
        super().__init__(options, args, state, *run)
        if state.max_steps < options.every:
            raise InputError(f"every={options.every}: training has only {state.max_steps} steps")
        if args.torch_compile:
            raise InputError("source='online' does not work with torch_compile=True. Use source='pass'.")
        self._average: dict[str, Tensor] = {}
        self._steps_used, self._examples_used = 0, 0
        self._recorder = BatchRecorder(self.model)
        self._formulas: Formulas | None = None

    def begin_step(self, step: int) -> None:
        self._recorder.take()
        self._recorder.active = step % self.options.every == 0

    def before_update(self, step: int) -> None:
        if step % self.options.every:
            return
        batches, processes = self._recorder.take(), initialized()
        counts = processes.all_gather(sum(map(examples_in, map(model_inputs, batches))))
        first = self._examples_used + sum(counts[: processes.rank])

        def compute() -> dict[str, Tensor]:
            if batches and (self._formulas is None or not self._formulas.conclusive):
                with evaluation_mode(self.model, self.device):
                    self._formulas = verify_formulas(self.model, model_inputs(batches[0]), self.device)
            sums = self.squared_gradients(batches, first, self._formulas)
            if not bool(torch.stack([value.isfinite().all() for value in sums.values()]).all()):
                raise InputError("squared gradients are not finite")
            return sums

        try:
            sums = sum_over_processes(compute)
        except GradmergeError as problem:
            if not self._steps_used:
                raise
            # A missing step is no reason to lose a training run.
            _log.warning("CurvatureCallback: step %d is not in the running average: %s", step, problem)
            return
        self._steps_used += 1
        self._examples_used += sum(counts)
        if self.args.should_save:
            weight = (1 - self.options.decay) / sum(counts)
            for name, value in sums.items():
                if name in self._average:
                    self._average[name].mul_(self.options.decay).add_(value, alpha=weight)
                else:
                    self._average[name] = value * weight

    def at_checkpoint(self, step: int) -> Curvature | None:
        if self._steps_used == 0:
            self.warn(f"no step was used yet (every={self.options.every}): no curvature is written")
            return None
        examples, decay = self.examples(step), self.options.decay
        weights = -math.expm1(self._steps_used * math.log(decay)) if decay > 0 else 1.0
        sums = {name: (value * (examples / weights)).cpu() for name, value in self._average.items()}
        return self.curvature(sums, examples, self.options.likelihood)

    def write_state(self, folder: Path, step: int) -> None:
        metadata = {"step": step, "decay": self.options.decay, "shapes": self._shapes(self._average)}
        metadata |= {"steps_used": self._steps_used, "examples_used": self._examples_used}
        tensors = {name: value.detach().cpu().contiguous() for name, value in self._average.items()}
        # One key, because safetensors does not keep the order of several.
        save_file(tensors, folder / RUNNING_AVERAGE, metadata={"gradmerge": json.dumps(metadata)})

    def resume(self, folders: list[Path], step: int) -> None:
        paths = [path for folder in folders if (path := folder / STEM / RUNNING_AVERAGE).is_file()]
        if paths and self.args.should_save:
            self._read_state(paths[0], step)
        if not paths and step >= self.options.every:
            self.warn(
                f"training resumes at step {step}, but there is no {RUNNING_AVERAGE} in "
                f"{' or '.join(str(f / STEM) for f in folders)}: the running average restarts. If the checkpoint is "
                "elsewhere, set resume_from_checkpoint in the TrainingArguments as well."
            )
        self._steps_used = max(initialized().all_gather(self._steps_used))
        self._examples_used = max(initialized().all_gather(self._examples_used))

    def _read_state(self, path: Path, step: int) -> None:
        shapes = self._shapes(self.parameters)
        expected = {"step": step, "decay": self.options.decay, "shapes": shapes}
        try:
            with safe_open(path, framework="pt") as file:
                metadata = json.loads(file.metadata()["gradmerge"])
                if {key: metadata[key] for key in expected} != expected:
                    raise ValueError(f"it is of another step, decay or model than step {step} of this run")
                self._average = {name: file.get_tensor(name).to(self.device) for name in shapes}
            self._steps_used, self._examples_used = int(metadata["steps_used"]), int(metadata["examples_used"])
        except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}: cannot continue the running average: {error}. Remove the file to restart the average."
            ) from error

    def _shapes(self, tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
        return {name: list(value.shape) for name, value in tensors.items()}

    def close(self) -> None:
        self._recorder.remove()


class PassSource(CurvatureSource):
    """Σ_i g_i² over the first ``limit`` training examples, at the final weights."""

    def __init__(self, options: SourceOptions, *run: Any) -> None:
        super().__init__(options, *run)
        data = self.loader.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise InputError("source='pass' needs a dataset with a length and an index. Use source='online'.")
        with evaluation_mode(self.model, self.device):  # collators may draw random numbers
            model_inputs(self.loader.collate_fn([data[0]]))

    def at_end(self, step: int) -> Curvature | None:
        data = self.loader.dataset
        total = len(data) if self.options.limit is None else min(self.options.limit, len(data))
        rows = initialized().share(total)

        def compute() -> dict[str, Tensor]:
            if not rows:
                return {n: torch.zeros_like(p, dtype=sum_type(p)).detach() for n, p in self._named()}
            with evaluation_mode(self.model, self.device):
                torch.manual_seed(self.options.seed)  # collators that draw random numbers draw the same every time
                loader = DataLoader(
                    Subset(data, rows),
                    batch_size=self.options.batch_size or self.args.per_device_train_batch_size,
                    collate_fn=self.loader.collate_fn,
                    num_workers=self.args.dataloader_num_workers,
                )
                return self.squared_gradients(loader, rows.start)

        return self.curvature(sum_over_processes(compute), total, self.options.likelihood)


SOURCES: dict[str, type[CurvatureSource]] = {"adam": AdamSource, "online": OnlineSource, "pass": PassSource}


def model_inputs(batch: Batch) -> Batch:
    """Return the model's inputs in a batch. Raise InputError if it has no labels for the model's own loss."""
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    if not isinstance(inputs.get("labels"), Tensor):
        raise InputError(
            f"CurvatureCallback: the model gets {', '.join(inputs)} but no 'labels', so the loss of an example is "
            "unknown. Name the label column `labels`, and do not use label smoothing or compute_loss_func, or use "
            "source='adam'."
        )
    return inputs


def sum_over_processes(compute: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
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


def loss_scale(args: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    """Return s: the optimizer's gradient is s times the mean gradient of a step's examples.

    The Trainer adds up the losses of accumulated batches and of processes. It expects the model to divide each loss by
    `num_items_in_batch`, the number of labels in the whole step. A model that divides by the number in its own batch
    makes the sum too large by the number of batches; such a model returns the same loss for any `num_items_in_batch`.
    """
    items = batch.get("num_items_in_batch")
    if items is None or "labels" not in batch:
        return 1
    with evaluation_mode(model, next(model.parameters()).device), torch.no_grad():
        one, two = (_loss(model(**batch | {"num_items_in_batch": n})) for n in (items, 2 * items))
    if one is None or two is None or abs(one - two) > 1e-3 * abs(one):
        return 1
    world_size = initialized().world_size if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps) * world_size


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


@contextlib.contextmanager
def evaluation_mode(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Put the model into evaluation mode. Restore modes and all random number generators at the end."""
    devices = [] if device.type == "cpu" else [device]
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
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
