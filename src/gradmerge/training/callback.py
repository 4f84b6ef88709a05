"""Curvature as a by-product of training with transformers' Trainer."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerState, TrainingArguments

from ..arguments import check_known
from ..curvature.curvature import Curvature
from ..curvature.estimate import LIKELIHOODS
from ..curvature.format import PRECISIONS, STEM
from ..errors import GradmergeError, InputError
from ..io.atomic_dir import AtomicDir
from ..io.reader import close_files, open_files
from .curvature_sources import CallbackOptions, FromAdam, FromPass, FromRunningAverage, Origin, Training
from .curvature_targets import measured_tensors
from .running_average import STATE
from .trainer_processes import sharding

SOURCES = ("adam", "online", "pass")
_log = logging.getLogger(__name__)


class CurvatureCallback(TrainerCallback):
    """Writes a `curvature/` folder into every checkpoint of a Trainer, and into its output folder when training ends.

    A merge finds it there by itself. Values are sums over the N training examples of squared gradients of single
    examples, Σ_i [∇ℓ_i]², or an estimate of that sum; tensors have the names and shapes of the model's files. Training
    is not changed: weights, gradients and random numbers are the same, bit for bit, as without the callback.

    ``source`` says where the curvature comes from:

    - `adam`: N·B·v̂, with Adam's bias-corrected second moments v̂ and B examples in a step. It costs nothing. It squares
      the mean gradient of a step: too large by up to a factor B, unless the spread of the examples' gradients is far
      larger than their mean, as near the end of fine-tuning. Gradient clipping takes its scale away: train with
      `max_grad_norm=0`, or expect a warning. It needs an Adam of PyTorch or `gm.PriorAdamW`.
    - `online`: N·E, with the bias-corrected running average E ← decay·E + (1 − decay)·(1/n) Σ_i [∇ℓ_i]² over the n
      examples of every ``every``-th step, which costs about one training step more. The average takes 4 bytes per
      weight; such a step takes 4 more, the first time 12.
    - `pass`: Σ_i [∇ℓ_i]² at the trained weights, over the first ``limit`` training examples. It costs a pass over them,
      and of the checkpoints only the one with the trained weights gets it.

    `online` and `pass` differentiate the model's own log-likelihood of `labels`, summed over an example's tokens,
    without dropout. `adam` sees the loss of training, which for language models is a mean over tokens.

    - **Gradient accumulation, several processes** (DDP): as one batch as large. If the Trainer trains on some examples
      twice to give all processes equally many, `adam` and `online` count them twice. Sharded parameters (FSDP,
      DeepSpeed, tensor parallelism) are refused.
    - **Mixed precision**: gradients are those of the model as it is trained; sums are float32.
    - **Adapters** (PEFT): curvature of the adapter's own tensors, by the names of `adapter_model.safetensors`; or with
      ``adapted=True``, for LoRA, of the full weights W + s·BA by the names of the base's files, which a merge needs.
    - **Frozen parameters** get no curvature; a recipe then needs `missing: zero`.
    - **Resuming** gives the same bytes as training in one go. `online` keeps its average in the checkpoint (unless
      `save_only_model=True`), looked for in `resume_from_checkpoint` of the TrainingArguments, then in `output_dir`.
    - **`load_best_model_at_end`**: the output folder gets the curvature of the best checkpoint, as it gets its weights.
    - **Data without a length** (streamed): N is the number of examples seen. `pass` needs a length.

    An old curvature folder is replaced, whole or not at all. Wrong settings raise when training begins, or at the first
    estimate. If a curvature cannot be written later, that is logged as an error and training goes on.

    Args:
        source: `adam`, `online` or `pass`.
        every: With `online`, use optimizer steps whose number is a multiple of this.
        decay: With `online`, how much of the average stays at each step used, in [0, 1): it reaches back over about
            1/(1 − decay) of them.
        likelihood: With `online` and `pass`: `empirical`, `sampled` or `exact` labels, as in `gm.estimate_curvature`.
        limit: With `pass`, how many examples, the first of the data; all by default.
        batch_size: With `pass`, examples in a forward pass; by default that of training.
        adapted: Estimate for the full weights under a LoRA adapter instead of the adapter's tensors. Not with `adam`.
        precision: `float32`, `bfloat16` or `log8`: how values are stored.
        seed: Of labels that are drawn, and of random numbers in the data's collator during `pass`.

    Example:
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[gm.CurvatureCallback("online")])
        >>> trainer.train()
        >>> trainer.save_model()  # into arguments.output_dir, where curvature/ lies already
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
        adapted: bool = False,
        precision: str = "float32",
        seed: int = 0,
    ) -> None:
        for option, value, known in (
            ("source", source, SOURCES),
            ("likelihood", likelihood, LIKELIHOODS),
            ("precision", precision, tuple(PRECISIONS)),
        ):
            check_known(f"{option} {value!r}", str(value), known)
        for option, number in (("every", every), ("limit", limit), ("batch_size", batch_size), ("seed", seed)):
            if number is None and option in ("limit", "batch_size"):
                continue
            if isinstance(number, bool) or not isinstance(number, int):
                raise InputError(f"{option}={number!r}: a whole number")
            if number < 1 and option != "seed":
                raise InputError(f"{option}={number}: at least 1")
        if not isinstance(decay, int | float) or not 0 <= decay < 1:
            raise InputError(f"decay={decay}: a number from 0 up to, but not including, 1")
        if source != "pass" and (limit is not None or batch_size is not None):
            raise InputError(f"limit and batch_size are for source='pass', and this is source={source!r}")
        instead = "Use source='online' or 'pass'."
        if source == "adam" and likelihood != "empirical":
            raise InputError(f"likelihood={likelihood!r}: Adam's moments are of the data's labels. {instead}")
        if source == "adam" and adapted:
            told = "Adam's moments are of the adapter's factors, and do not give the curvature of the full weights"
            raise InputError(f"adapted=True: {told}. {instead}")
        self.source, self.adapted, self.precision = source, adapted, precision
        self.options = CallbackOptions(every, decay, likelihood, limit, batch_size, seed)
        self._origin: Origin | None = None
        self._saved: int | None = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Check everything that can be checked before hours of training."""
        self._close()
        model: nn.Module = kwargs["model"]
        if kind := sharding(args, model):
            raise InputError(
                f"CurvatureCallback: parameters are spread over processes ({kind}), and curvature is estimated where "
                "each process holds them whole, as in data-parallel training (DDP). Leave the callback out, and "
                "run on the trained model: gradmerge curvature estimate."
            )
        _check_replaceable(Path(str(args.output_dir)) / STEM)
        found = state.train_batch_size if args.auto_find_batch_size else None
        training = Training(
            args=args,
            measured=measured_tensors(model, self.adapted),
            optimizer=kwargs["optimizer"],
            loader=kwargs["train_dataloader"],
            batch=int((found or args.train_batch_size) * args.gradient_accumulation_steps * args.world_size),
            first_step=state.global_step,
        )
        self._saved = state.global_step if state.global_step else None
        if self.source == "adam":
            self._origin = FromAdam(training, self.options)
        elif self.source == "pass":
            self._origin = FromPass(training, self.options)
        else:
            self._origin = online = FromRunningAverage(training, self.options, state.max_steps)
            if state.global_step:
                online.resume(_resumed_from(args, state), state.global_step)
        for note in training.measured.notes():
            training.say(note)

    def on_step_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._origin is not None:
            self._origin.begin_step(state.global_step + 1)

    def on_pre_optimizer_step(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._origin is not None:
            self._origin.before_update(state.global_step + 1)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._origin is not None:
            self._origin.logged(kwargs.get("logs") or {})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._origin is None:
            return
        step = self._saved = state.global_step
        curvature = _made(self._origin.at_checkpoint, step)
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{step}"
        if curvature is not None and checkpoint.is_dir():
            self._write(curvature, checkpoint, step, None if args.save_only_model else self._origin)
        elif curvature is not None:
            _log.warning("CurvatureCallback: %s is not there: its curvature is not written", checkpoint)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self._origin is not None:
            try:
                self._finish(self._origin, args, state)
            finally:
                self._close()

    def _finish(self, origin: Origin, args: TrainingArguments, state: TrainerState) -> None:
        out, step = Path(str(args.output_dir)), state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        held = Path(best) if best else out / f"checkpoint-{step}"
        is_other = best is not None and state.best_global_step != step
        if self.source != "pass" and (is_other or step == origin.training.first_step):
            # The weights are those of a checkpoint, whose curvature was estimated when it was written.
            if args.should_save:
                _copy(held / STEM, out / STEM)
            return
        if (curvature := _made(origin.at_end, step)) is not None:
            self._write(curvature, out, step)
            if self.source == "pass" and held.is_dir() and (best is not None or self._saved == step):
                self._write(curvature, held, step)

    def _write(self, curvature: Curvature, folder: Path, step: int, resumable: Origin | None = None) -> None:
        try:
            with AtomicDir(folder / STEM, "curvature", force=True) as staging:
                curvature.write(staging.folder, self.precision)
                if resumable is not None:
                    resumable.write_state(staging.folder, step)
        except (GradmergeError, OSError) as error:
            _log.error("CurvatureCallback: %s: no curvature is written: %s", folder, error)

    def _close(self) -> None:
        if self._origin is not None:
            self._origin.close()
        self._origin = None


def _made(make: Callable[[int], Curvature | None], step: int) -> Curvature | None:
    try:
        return make(step)
    except GradmergeError as error:
        _log.error("CurvatureCallback: no curvature is written: %s", error)
        return None


def _copy(curvature: Path, target: Path) -> None:
    """Copy a curvature folder, without what a resumed run goes on from."""
    if not curvature.is_dir():
        _log.warning("CurvatureCallback: %s is not there: %s is not written", curvature, target)
        return
    try:
        with AtomicDir(target, "curvature", force=True) as staging:
            for path in curvature.iterdir():
                if path.name != STATE:
                    shutil.copy2(path, staging.folder / path.name)
    except (GradmergeError, OSError) as error:
        _log.error("CurvatureCallback: %s is not written: %s", target, error)


def _check_replaceable(folder: Path) -> None:
    """Raise if something that is no curvature is where the new one goes."""
    if not folder.exists() and not folder.is_symlink():
        return
    files = open_files(folder, STEM) if folder.is_dir() and not folder.is_symlink() else None
    if files is None:
        raise InputError(
            f"{folder}: is there, and is not a curvature folder. The curvature of the trained model is to be written "
            "there: move it away, or choose another output_dir."
        )
    close_files(files)


def _resumed_from(args: TrainingArguments, state: TrainerState) -> list[Path]:
    """Where the checkpoint may lie; the Trainer does not tell its callbacks."""
    named = args.resume_from_checkpoint
    given = [Path(named)] if isinstance(named, str) and Path(named).is_dir() else []
    return [*given, Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"]
