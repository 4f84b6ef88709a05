"""Curvature as a by-product of training with transformers' Trainer."""

from __future__ import annotations

import contextlib
import logging
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..arguments import check, check_known
from ..curvature.batches import IndexedBatches, examples_in
from ..curvature.checkpoint_names import adapter_names, is_adapted, stored_shapes, stored_tensors
from ..curvature.curvature import Curvature
from ..curvature.estimate import LIKELIHOODS, estimate_curvature
from ..curvature.format import PRECISIONS, STEM
from ..curvature.from_optimizer import second_moment, token_note
from ..curvature.kernels import sum_type
from ..distributed import initialized
from ..errors import GradmergeError, InputError
from ..io.atomic_dir import AtomicDir
from ..text import listed

_log = logging.getLogger(__name__)
Batch = Mapping[str, Any]
SOURCES = ("adam", "pass")
#: Optimizers whose `exp_avg_sq` is a running mean of squared gradients.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)
#: Keyword arguments that the Trainer adds to a batch.
_NOT_INPUTS = ("num_items_in_batch", "return_dict")


class CurvatureCallback(TrainerCallback):
    """Writes a `curvature/` folder into every checkpoint of a Trainer, and into its output folder when training ends.

    A merge finds it there by itself. Values are sums over the N training examples of squared per-example gradients,
    Σ_i [∇ℓ_i]², or an estimate of that sum, with the names and shapes of the model's files. The callback does not
    change training: weights, gradients and random numbers stay the same, bit for bit.

    ``source`` selects how curvature is obtained:

    - `adam`: N·B·v̂, with Adam's bias-corrected second moments v̂ and B examples per step. It is free. It squares the
      mean gradient of a step: it is too large by up to a factor B, unless the examples' gradients vary much more than
      their mean, as near the end of fine-tuning. Gradient clipping distorts its scale: train with `max_grad_norm=0`.
      It needs an Adam of PyTorch or `gm.PriorAdamW`.
    - `pass`: Σ_i [∇ℓ_i]² at the final weights, over the first ``limit`` training examples. It costs a pass over them.
      Only the checkpoint with the final weights gets it.

    `pass` uses the model's log-likelihood of `labels`, summed over an example's tokens, without dropout. `adam` uses
    the training loss, which for language models is a mean over tokens.

    - **Gradient accumulation, several processes** (DDP): count as one large batch. If the Trainer repeats examples to
      give all processes equally many, `adam` counts them twice. Sharded parameters (FSDP, DeepSpeed, tensor
      parallelism) are refused.
    - **Mixed precision**: gradients are those of the model as it is trained; sums are float32.
    - **Adapters** (PEFT): curvature of the adapter's own tensors, with the names of `adapter_model.safetensors`. For
      the full weights, which a merge needs, run `gradmerge curvature estimate` on the saved adapter.
    - **Frozen parameters** get no curvature; a recipe then needs `missing: zero`.
    - **`load_best_model_at_end`**: the output folder gets the curvature of the best checkpoint.
    - **Streamed datasets**: N is the number of examples seen. `pass` needs a length.

    The callback replaces an existing curvature folder atomically. Invalid settings raise when training begins. Later
    failures are logged as errors, and training continues.

    Args:
        source: `adam` or `pass`.
        likelihood: With `pass`: `empirical`, `sampled` or `exact` labels, as in `gm.estimate_curvature`.
        limit: With `pass`, the number of examples, from the first; default: all.
        batch_size: With `pass`, examples per forward pass; default: that of training.
        precision: `float32`, `bfloat16` or `log8`: how values are stored.
        seed: For sampled labels, and for random numbers in the collator during `pass`.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[gm.CurvatureCallback("pass")])
        >>> trainer.train()
        >>> trainer.save_model()  # into arguments.output_dir, which already has curvature/
    """

    def __init__(
        self,
        source: str = "adam",
        *,
        likelihood: str = "empirical",
        limit: int | None = None,
        batch_size: int | None = None,
        precision: str = "float32",
        seed: int = 0,
    ) -> None:
        for option, word, known in (
            ("source", source, SOURCES),
            ("likelihood", likelihood, LIKELIHOODS),
            ("precision", precision, tuple(PRECISIONS)),
        ):
            check_known(f"{option} {word!r}", str(word), known)
        for option, number, hint in (("limit", limit, int | None), ("batch_size", batch_size, int | None)):
            check(option, number, hint)
            if number is not None and number < 1:
                raise InputError(f"{option}={number}: must be at least 1")
        check("seed", seed, int)
        if source == "adam" and (limit is not None or batch_size is not None or likelihood != "empirical"):
            raise InputError("limit, batch_size and likelihood need source='pass'. Adam sees the data's labels.")
        self.source, self.likelihood, self.precision = source, likelihood, precision
        self.limit, self.batch_size, self.seed = limit, batch_size, seed
        self._run: _Run | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check everything that can be checked before hours of training."""
        model: nn.Module = kwargs["model"]
        if isinstance(self._run, _AdamRun):  # of a training that raised an error
            self._run.close()
        if kind := sharding(args, model):
            raise InputError(
                f"CurvatureCallback: parameters are sharded ({kind}). Use data-parallel training (DDP), or run "
                "`gradmerge curvature estimate` on the trained model."
            )
        if args.should_save:
            with AtomicDir(Path(str(args.output_dir)) / STEM, "curvature", force=True) as staging:
                staging.temporary = True  # only checks that the folder can be replaced
        make = _AdamRun if self.source == "adam" else _PassRun
        self._run = make(self, args, state, model, kwargs["optimizer"], kwargs["train_dataloader"])

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if isinstance(self._run, _AdamRun):
            self._run.find_scale()

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._run is not None:
            self._run.saved_step = step = state.global_step
            if isinstance(self._run, _AdamRun):
                self._write(self._run, step, [Path(str(args.output_dir)) / f"checkpoint-{step}"])

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        run, self._run = self._run, None
        if run is None:
            return
        out, step = Path(str(args.output_dir)), state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        checkpoint = Path(best) if best else out / f"checkpoint-{step}"
        if isinstance(run, _AdamRun):
            run.close()
            if (best is not None and state.best_global_step != step) or step == run.first_step:
                # The weights are those of a checkpoint, which has its curvature.
                if args.should_save:
                    _replace(out / STEM, lambda folder: shutil.copytree(checkpoint / STEM, folder, dirs_exist_ok=True))
                return
            self._write(run, step, [out])
        else:
            self._write(run, step, [out, checkpoint] if best is not None or run.saved_step == step else [out])

    def _write(self, run: _Run, step: int, folders: list[Path]) -> None:
        """Compute the curvature, in which all processes take part, and write it into model folders."""
        try:
            curvature = run.curvature(step)
        except GradmergeError as error:
            _log.error("CurvatureCallback: no curvature is written: %s", error)
            return
        if curvature is not None and run.args.should_save:
            for folder in folders:
                _replace(folder / STEM, lambda staging: curvature.write(staging, self.precision))


def _replace(folder: Path, write: Callable[[Path], Any]) -> None:
    """Replace a curvature folder atomically. Log an error instead of raising it: training continues."""
    try:
        with AtomicDir(folder, "curvature", force=True) as staging:
            write(staging.folder)
    except (GradmergeError, OSError) as error:
        _log.error("CurvatureCallback: cannot write %s: %s", folder, error)


class _Run:
    """A training run, and how its curvature is computed."""

    def __init__(
        self, options: CurvatureCallback, args: Any, state: Any, model: nn.Module, optimizer: Any, loader: Any
    ):
        self.options, self.args, self.model, self.optimizer, self.loader = options, args, model, optimizer, loader
        self.first_step: int = state.global_step
        """Optimizer steps before this run; more than 0 if it resumes."""
        self.saved_step: int | None = state.global_step or None
        """The step of the last checkpoint."""
        self._file_names = adapter_names(model) if is_adapted(model) else None
        self.parameters: dict[str, nn.Parameter] = {
            name: p
            for name, p in model.named_parameters()
            if p.requires_grad and p.is_floating_point() and (self._file_names is None or name in self._file_names)
        }
        """The trained parameters, by name in memory; of a PEFT model, those that its adapter file holds."""
        if not self.parameters:
            raise InputError("no parameter of the model is trained (requires_grad=False for all)")
        # Raise before training, not after it, if the names of files cannot be determined.
        empty = {n: torch.empty(p.shape, dtype=p.dtype, device="meta") for n, p in self.parameters.items()}
        stored = self._to_stored(empty)
        if self._file_names is not None:
            self.warn(
                "this is the curvature of the adapter's own tensors. To merge the full weights, run `gradmerge "
                "curvature estimate` on the saved adapter."
            )
        elif missing := [name for name in stored_shapes(model) if name not in stored]:
            self.warn(
                f"{len(missing)} parameters are not trained and get no curvature. A recipe that uses it needs "
                f"`missing: zero`, or must exclude them:\n{listed(missing, 4)}"
            )

    def curvature(self, step: int) -> Curvature | None:
        """Return the curvature after ``step`` steps. All processes call this."""
        raise NotImplementedError

    def warn(self, text: str) -> None:
        if self.args.should_save:
            _log.warning("CurvatureCallback: %s", text)

    def _named(self, sums: Mapping[str, Tensor], examples: int, likelihood: str) -> Curvature:
        """Return the curvature with the names of files."""
        return Curvature(self._to_stored(sums), examples, likelihood, Path(self.args.output_dir).resolve().name)

    def _to_stored(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._file_names is None:
            return stored_tensors(self.model, tensors)
        return {self._file_names[name]: value for name, value in tensors.items()}


class _AdamRun(_Run):
    """N·B·v̂ / s², with N examples, B examples per step, and v̂ from Adam's state.

    The optimizer's gradient is s times the mean gradient of a step's examples: s is 1 unless the Trainer adds up losses
    that it should average (see `loss_scale`).
    """

    def __init__(self, options: CurvatureCallback, args: Any, state: Any, model: nn.Module, *rest: Any) -> None:
        super().__init__(options, args, state, model, *rest)
        while not isinstance(self.optimizer, _ADAMS) and hasattr(self.optimizer, "optimizer"):
            self.optimizer = self.optimizer.optimizer
        if not isinstance(self.optimizer, _ADAMS):
            raise InputError(
                "source='adam' needs PyTorch's Adam or AdamW (optim='adamw_torch' or 'adamw_torch_fused', or "
                f"gm.PriorAdamW), not {type(self.optimizer).__name__}. Use source='pass'."
            )
        batch_size = (state.train_batch_size if args.auto_find_batch_size else None) or args.train_batch_size
        self._step_size = int(batch_size * args.gradient_accumulation_steps * args.world_size)
        """B: examples per optimizer step, over all processes and accumulated batches."""
        self._scale = 1
        self._first_batch: dict[str, Any] | None = None
        self._hook: Any = None
        if args.gradient_accumulation_steps > 1 or initialized().world_size > 1:
            if args.torch_compile:
                raise InputError(
                    "source='adam' does not work with torch_compile=True and several batches per step. Use "
                    "source='pass'."
                )
            self._hook = model.register_forward_pre_hook(self._record, with_kwargs=True)
        if args.max_grad_norm:
            self.warn(
                f"max_grad_norm={args.max_grad_norm:g}: where gradients are clipped, Adam's second moments are too "
                "small. Train with max_grad_norm=0, or use source='pass'."
            )
        for note in token_note(model.get_base_model() if is_adapted(model) else model):  # type: ignore[operator]
            self.warn(note)

    def _record(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._first_batch is None and model.training:
            self._first_batch = dict(kwargs)

    def find_scale(self) -> None:
        """Find s from the first batch. Called before each optimizer step."""
        if self._first_batch is not None:
            batch = self._first_batch
            self.close()
            self._scale = loss_scale(self.args, self.model, batch)

    def close(self) -> None:
        """Remove the hook from the model."""
        if self._hook is not None:
            self._hook.remove()
        self._hook = self._first_batch = None

    def curvature(self, step: int) -> Curvature | None:
        try:
            examples = len(self.loader.dataset)
        except TypeError:  # a streamed dataset
            examples = step * self._step_size
        factor = float(examples) * self._step_size / self._scale**2
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
        return self._named(sums, examples, "adam")


class _PassRun(_Run):
    """Σ_i g_i² over the first ``limit`` training examples, at the final weights."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        data = self.loader.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise InputError("source='pass' needs a dataset with a length and an index")
        with evaluation_mode(self.model):  # collators may draw random numbers
            _model_inputs(self.loader.collate_fn([data[0]]))

    def curvature(self, step: int) -> Curvature:
        data, options = self.loader.dataset, self.options
        total = len(data) if options.limit is None else min(options.limit, len(data))
        rows = initialized().share(total)
        sums = {n: torch.zeros_like(p, dtype=sum_type(p)).detach() for n, p in self.parameters.items()}
        problem: GradmergeError | None = None
        try:
            if rows:
                sums |= self._sums_over(data, rows)
        except GradmergeError as error:
            problem = error
        if any(initialized().all_gather(problem is not None)):  # if one process fails, all of them raise
            raise problem or InputError("another process failed on its examples")
        initialized().all_reduce(sums.values())
        return self._named(sums, total, options.likelihood)

    def _sums_over(self, data: Any, rows: range) -> dict[str, Tensor]:
        """Return Σ_i g_i² over these rows of the data, by names in memory."""
        options = self.options
        with evaluation_mode(self.model):
            torch.manual_seed(options.seed)  # collators that draw random numbers draw the same every time
            loader: Iterable[Batch] = DataLoader(
                Subset(data, rows),
                batch_size=options.batch_size or self.args.per_device_train_batch_size,
                collate_fn=self.loader.collate_fn,
                num_workers=self.args.dataloader_num_workers,
            )

            def indexed_inputs() -> Iterator[tuple[int, Batch]]:
                index = rows.start  # sampled labels depend on it
                for batch in loader:
                    yield index, _model_inputs(batch)
                    index += examples_in(batch)

            device = next(iter(self.parameters.values())).device
            estimate = estimate_curvature(
                self.model, IndexedBatches(indexed_inputs), options.likelihood, seed=options.seed, device=device
            )
        return {name: value for name, value in estimate.sum().items() if name in self.parameters}


def _model_inputs(batch: Batch) -> Batch:
    """Return the model's inputs in a batch. Raise InputError if it has no labels for the model's own loss."""
    inputs = {name: value for name, value in batch.items() if name not in _NOT_INPUTS}
    if not isinstance(inputs.get("labels"), Tensor):
        raise InputError(
            f"CurvatureCallback: the model gets {', '.join(inputs)} but no 'labels', so the loss of an example is "
            "unknown. Name the label column `labels`, and do not use label smoothing or compute_loss_func, or use "
            "source='adam'."
        )
    return inputs


def loss_scale(args: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    """Return s: the optimizer's gradient is s times the mean gradient of a step's examples.

    The Trainer adds up the losses of accumulated batches and of processes. It expects the model to divide each loss by
    `num_items_in_batch`, the number of labels in the whole step. A model that divides by the number in its own batch
    makes the sum too large by the number of batches; such a model returns the same loss for any `num_items_in_batch`.
    """
    items = batch.get("num_items_in_batch")
    if items is None or "labels" not in batch:
        return 1
    with evaluation_mode(model), torch.no_grad():
        one, two = (_loss(model(**batch | {"num_items_in_batch": n})) for n in (items, 2 * items))
    if one is None or two is None or abs(one - two) > 1e-3 * abs(one):
        return 1
    world_size = initialized().world_size if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps) * world_size


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into evaluation mode. Restore modes and all random number generators at the end."""
    device = next(model.parameters()).device
    devices = [] if device.type == "cpu" else [device]
    with contextlib.ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        stack.enter_context(torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"))
        for module in model.modules():
            stack.callback(setattr, module, "training", module.training)
        model.eval()
        yield


def sharding(args: Any, model: nn.Module) -> str | None:
    """Return what shards the parameters of a Trainer (FSDP, DEEPSPEED, …), or None if each process holds them whole."""
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
    from torch.distributed.tensor import DTensor

    state = AcceleratorState()  # also knows what `accelerate launch` set up
    uses_fsdp = args.fsdp or getattr(state, "fsdp_plugin", None) is not None
    kind = "FSDP" if uses_fsdp else str(state.distributed_type.value)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP"):
        return kind
    return "DTensor" if any(isinstance(p, DTensor) for p in model.parameters()) else None
