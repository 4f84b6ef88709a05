"""Curvature as a by-product of training with transformers' Trainer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..arguments import check, check_known
from ..curvature.curvature import Curvature
from ..curvature.estimate import LIKELIHOODS
from ..curvature.format import PRECISIONS, STEM
from ..errors import GradmergeError, InputError
from ..io.atomic_dir import AtomicDir
from .curvature_sources import RUNNING_AVERAGE, SOURCES, CurvatureSource, SourceOptions

_log = logging.getLogger(__name__)


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
    - `online`: N·E, with the bias-corrected running average E ← decay·E + (1 − decay)·(1/n) Σ_i [∇ℓ_i]² over the n
      examples of every ``every``-th step, each of which costs about one training step more. The average takes 4 bytes
      per weight; such a step takes 4 more, the first one 12.
    - `pass`: Σ_i [∇ℓ_i]² at the final weights, over the first ``limit`` training examples. It costs a pass over them.
      Only the checkpoint with the final weights gets it.

    `online` and `pass` use the model's log-likelihood of `labels`, summed over an example's tokens, without dropout.
    `adam` uses the training loss, which for language models is a mean over tokens.

    - **Gradient accumulation, several processes** (DDP): count as one large batch. If the Trainer repeats examples to
      give all processes equally many, `adam` and `online` count them twice. Sharded parameters (FSDP, DeepSpeed,
      tensor parallelism) are refused.
    - **Mixed precision**: gradients are those of the model as it is trained; sums are float32.
    - **Adapters** (PEFT): curvature of the adapter's own tensors, with the names of `adapter_model.safetensors`. For
      the full weights, which a merge needs, run `gradmerge curvature estimate` on the saved adapter.
    - **Frozen parameters** get no curvature; a recipe then needs `missing: zero`.
    - **Resuming** gives the same bytes as an uninterrupted run. `online` saves its average in the checkpoint (unless
      `save_only_model=True`), and looks for it in `resume_from_checkpoint` of the TrainingArguments, then in
      `output_dir`.
    - **`load_best_model_at_end`**: the output folder gets the curvature of the best checkpoint.
    - **Streamed datasets**: N is the number of examples seen. `pass` needs a length.

    The callback replaces an existing curvature folder atomically. Invalid settings raise when training begins, or at
    the first estimate. Later failures are logged as errors, and training continues.

    Args:
        source: `adam`, `online` or `pass`.
        every: With `online`, use optimizer steps whose number is a multiple of this.
        decay: With `online`, the decay of the average, in [0, 1): it covers about 1/(1 − decay) used steps.
        likelihood: With `online` and `pass`: `empirical`, `sampled` or `exact` labels, as in `gm.estimate_curvature`.
        limit: With `pass`, the number of examples, from the first; default: all.
        batch_size: With `pass`, examples per forward pass; default: that of training.
        precision: `float32`, `bfloat16` or `log8`: how values are stored.
        seed: For sampled labels, and for random numbers in the collator during `pass`.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[gm.CurvatureCallback("online")])
        >>> trainer.train()
        >>> trainer.save_model()  # into arguments.output_dir, which already has curvature/
    """

    def __init__(
        self,
        source: str = "adam",
        *,
        every: int = 10,
        decay: float = 0.99,
        likelihood: str = "empirical",
        limit: int | None = None,
        batch_size: int | None = None,
        precision: str = "float32",
        seed: int = 0,
    ) -> None:
        for option, word, known in (
            ("source", source, tuple(SOURCES)),
            ("likelihood", likelihood, LIKELIHOODS),
            ("precision", precision, tuple(PRECISIONS)),
        ):
            check_known(f"{option} {word!r}", str(word), known)
        for option, number, hint in (("every", every, int), ("limit", limit, int | None), ("seed", seed, int)):
            check(option, number, hint)
        check("batch_size", batch_size, int | None)
        if min(every, limit or every, batch_size or every) < 1 or not 0 <= decay < 1:
            raise InputError(
                f"every={every}, limit={limit}, batch_size={batch_size}, decay={decay}: numbers must be at least 1, "
                "and decay from 0 to below 1"
            )
        if source != "pass" and (limit is not None or batch_size is not None):
            raise InputError(f"limit and batch_size need source='pass', not {source!r}")
        if source == "adam" and likelihood != "empirical":
            raise InputError(f"likelihood={likelihood!r}: needs source='online' or 'pass'; Adam sees the data's labels")
        self.source, self.precision = source, precision
        self.options = SourceOptions(every, decay, likelihood, limit, batch_size, seed)
        self._active: CurvatureSource | None = None
        self._saved_step: int | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check everything that can be checked before hours of training."""
        self._close()
        model: nn.Module = kwargs["model"]
        if kind := sharding(args, model):
            raise InputError(
                f"CurvatureCallback: parameters are sharded ({kind}). Use data-parallel training (DDP), or run "
                "`gradmerge curvature estimate` on the trained model."
            )
        if args.should_save:
            with AtomicDir(Path(str(args.output_dir)) / STEM, "curvature", force=True) as staging:
                staging.temporary = True  # only checks that the folder can be replaced
        source = SOURCES[self.source]
        self._saved_step = state.global_step or None
        self._active = source(self.options, args, state, model, kwargs["optimizer"], kwargs["train_dataloader"])
        if state.global_step:
            self._active.resume(_resumed_checkpoints(args, state), state.global_step)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._active is not None:
            self._active.begin_step(state.global_step + 1)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._active is not None:
            try:
                self._active.before_update(state.global_step + 1)
            except BaseException:
                self._close()
                raise

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._active is None:
            return
        step = self._saved_step = state.global_step
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{step}"
        if (curvature := _computed(self._active.at_checkpoint, step)) is not None:
            self._write(curvature, checkpoint, step, None if args.save_only_model else self._active)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._active is not None:
            try:
                self._finish(self._active, args, state)
            finally:
                self._close()

    def _finish(self, source: CurvatureSource, args: TrainingArguments, state: TrainerState) -> None:
        out, step = Path(str(args.output_dir)), state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        checkpoint = Path(best) if best else out / f"checkpoint-{step}"
        is_earlier = best is not None and state.best_global_step != step
        if self.source != "pass" and (is_earlier or step == source.first_step):
            # The weights are those of a checkpoint, which has its curvature.
            if args.should_save:
                _copy(checkpoint / STEM, out / STEM)
            return
        if (curvature := _computed(source.at_end, step)) is not None:
            self._write(curvature, out, step)
            if self.source == "pass" and (best is not None or self._saved_step == step):
                self._write(curvature, checkpoint, step)

    def _write(self, curvature: Curvature, folder: Path, step: int, resumable: CurvatureSource | None = None) -> None:
        def write(staging: Path) -> None:
            curvature.write(staging, self.precision)
            if resumable is not None:
                resumable.write_state(staging, step)

        _replace(folder / STEM, write)

    def _close(self) -> None:
        if self._active is not None:
            self._active.close()
        self._active = None


def _computed(compute: Callable[[int], Curvature | None], step: int) -> Curvature | None:
    try:
        return compute(step)
    except GradmergeError as error:
        _log.error("CurvatureCallback: no curvature is written: %s", error)
        return None


def _copy(curvature: Path, target: Path) -> None:
    """Copy a curvature folder without its running average."""

    def copy(staging: Path) -> None:
        for path in curvature.iterdir():
            if path.name != RUNNING_AVERAGE:
                shutil.copy2(path, staging / path.name)

    _replace(target, copy)


def _replace(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace a curvature folder atomically. Log an error instead of raising it: training continues."""
    try:
        with AtomicDir(folder, "curvature", force=True) as staging:
            write(staging.folder)
    except (GradmergeError, OSError) as error:
        _log.error("CurvatureCallback: cannot write %s: %s", folder, error)


def _resumed_checkpoints(args: TrainingArguments, state: TrainerState) -> list[Path]:
    """Return where the checkpoint may be; the Trainer does not pass it to callbacks."""
    named = args.resume_from_checkpoint
    explicit = [Path(named)] if isinstance(named, str) and Path(named).is_dir() else []
    return [*explicit, Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"]


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
