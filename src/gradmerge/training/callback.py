"""Curvature as a by-product of training with transformers' Trainer."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ..curvature.curvature import Curvature
from ..curvature.estimate import LIKELIHOODS
from ..curvature.files import PRECISIONS, STEM
from ..errors import GradmergeError, InputError
from ..storage.staging import Staging
from ..storage.tensorfile import close_files, open_files
from ..text import nearest
from .online import STATE
from .sources import Adam, Online, Options, Pass, Source, Training
from .subject import subject_of

SOURCES = ("adam", "online", "pass")
_log = logging.getLogger(__name__)


class CurvatureCallback(TrainerCallback):
    """Writes a `curvature/` folder into every checkpoint of a Trainer, and into its output folder when training ends.

    ```python
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[gm.CurvatureCallback()])
    trainer.train()
    trainer.save_model()  # into arguments.output_dir, where curvature/ lies already
    ```

    A merge finds it there by itself. Values are, as in every curvature file, sums over the N training examples of squared
    gradients of single examples, Σ_i [∇ℓ_i]², or an estimate of that sum; tensors have the names and shapes of the model's files.
    Training is not changed: weights, gradients and random numbers are the same, bit for bit, as without the callback.

    ``source`` says where the curvature comes from:

    | source | what is written | cost | in checkpoints |
    |---|---|---|---|
    | `adam` | N·B·v̂, v̂ being Adam's bias-corrected second moments and B the number of examples in a step | none | yes |
    | `online` | N·E, E ← decay·E + (1 − decay)·(1/n) Σ_i [∇ℓ_i]², bias-corrected, over the n examples of every ``every``-th step | about a training step more in each ``every``-th; 4 bytes a weight, and while it measures 4 more, the first time 12 | yes |
    | `pass` | Σ_i [∇ℓ_i]² at the trained weights, over the first ``limit`` examples of the training data | a pass over them | the one that holds the trained weights |

    `adam` squares the mean gradient of a step and not single examples': it is right for B = 1 or where the examples' gradients
    spread far more than their mean, as near the end of fine-tuning, and elsewhere too large, by at most a factor B. Gradient
    clipping, which the Trainer does by default (`max_grad_norm=1.0`), takes its scale away: train with `max_grad_norm=0`, or
    expect a warning. The loss of a language model is a mean over tokens, and the moments are of that mean; the other sources
    take the sum over an example's tokens, as `gradmerge curvature estimate` does. It works with `adamw_torch`, `adamw_torch_fused`,
    other Adams of PyTorch and `gm.PriorAdamW`, and with `save_only_model=True`. Other optimizers are refused when training begins.

    `online` and `pass` differentiate the model's own log-likelihood of `labels`, without dropout, whatever loss the Trainer
    was given; batches without `labels` are an error.

    - **Gradient accumulation**: B counts all accumulated batches; `online` measures all of a step's.
    - **Mixed precision**: gradients are those of the model as it is trained; sums are float32.
    - **Several processes** (DDP): sums over all processes, the same as of one process with batches as large; the main process
      writes. Where the data cannot be dealt out evenly, the Trainer trains on some examples twice, and `adam` and `online`
      see them twice; `pass` takes every example once. Sharded parameters (FSDP, DeepSpeed, tensor parallelism) are refused.
    - **Adapters** (PEFT): by default the curvature of the adapter's own tensors, by the names of `adapter_model.safetensors`. With
      ``adapted=True`` and LoRA, that of the full weights W + s·BA, all of them, by the names of the base's files: what a merge
      of adapter folders needs, and what merging the adapter and measuring the result would give. Not with `adam`,
      which knows only the factors.
    - **Frozen parameters** get no curvature; a recipe then needs `missing: zero`.
    - **Resuming** from a checkpoint gives the same bytes as training in one go. `online` keeps its average in the checkpoint as
      `curvature/online.safetensors` (unless `save_only_model=True`); it is looked for in `resume_from_checkpoint` of the
      TrainingArguments, then in `output_dir`.
    - **`load_best_model_at_end`**: the output folder gets the curvature of the best checkpoint, whose weights it will get.
    - **Data without a length** (streamed): N is the number of examples seen. `pass` needs a length.

    A curvature folder that is there already is replaced, whole or not at all. What is wrong with a setting is raised when
    training begins, or at the first measurement; if later a curvature cannot be written, that is logged as an error, and training
    goes on.

    Args:
        source: `adam`, `online` or `pass`.
        every: With `online`, measure optimizer steps whose number is a multiple of this.
        decay: With `online`, how much of the average stays at each measured step, in [0, 1): it reaches back over about
            1/(1 − decay) of them.
        likelihood: With `online` and `pass`: `empirical`, `sampled` or `exact` labels, as in `gm.estimate_curvature`.
        limit: With `pass`, how many examples, the first of the data; all by default.
        batch_size: With `pass`, examples in a forward pass; by default that of training.
        adapted: Measure the full weights under a LoRA adapter instead of the adapter's tensors.
        precision: `float32`, `bfloat16` or `log8`: how values are stored.
        seed: Of labels that are drawn, and of random numbers in the data's collator during `pass`.
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
            if value not in known:
                raise InputError(f"{option} {value!r}: known are {', '.join(known)}{nearest(value, known)}")
        for option, number in (("every", every), ("limit", limit), ("batch_size", batch_size)):
            if number is not None and number < 1:
                raise InputError(f"{option}={number}: at least 1")
        if not 0 <= decay < 1:
            raise InputError(f"decay={decay}: a number from 0 up to, but not including, 1")
        if source != "pass" and (limit is not None or batch_size is not None):
            raise InputError(f"limit and batch_size are for source='pass', and this is source={source!r}")
        if source == "adam" and likelihood != "empirical":
            raise InputError(
                f"likelihood={likelihood!r}: Adam's moments are of the data's labels. Use source='online' or 'pass'."
            )
        if source == "adam" and adapted:
            raise InputError(
                "adapted=True: Adam's moments are of the adapter's factors, and do not give the curvature of the full weights. Use "
                "source='online' or 'pass'."
            )
        self.source = source
        self.adapted = adapted
        self.precision = precision
        self.options = Options(every, decay, likelihood, limit, batch_size, seed)
        self._source: Source | None = None
        self._saved: int | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Check everything that can be checked before hours of training."""
        self._close()
        model: nn.Module = kwargs["model"]
        _check_parallel(args, model)
        _check_replaceable(Path(str(args.output_dir)) / STEM)
        training = Training(
            args=args,
            subject=subject_of(model, self.adapted),
            optimizer=kwargs["optimizer"],
            loader=kwargs["train_dataloader"],
            batch=_examples_in_a_step(args, state),
            first_step=state.global_step,
        )
        self._saved = state.global_step if state.global_step else None
        if self.source == "adam":
            self._source = Adam(training, self.options)
        elif self.source == "pass":
            self._source = Pass(training, self.options)
        else:
            online = Online(training, self.options, state.max_steps)
            self._source = online
            if state.global_step:
                online.resume(_resumed_from(args, state), state.global_step)
        for note in training.subject.notes():
            training.say(note)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._source is not None:
            self._source.begin_step(state.global_step + 1)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._source is not None:
            self._source.before_update(state.global_step + 1)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._source is not None:
            self._source.logged(kwargs.get("logs") or {})

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._source is None:
            return
        step = state.global_step
        self._saved = step
        curvature = self._found(self._source.at_checkpoint, step)
        checkpoint = Path(str(args.output_dir)) / f"checkpoint-{step}"
        if curvature is None:
            return
        if not checkpoint.is_dir():
            _log.warning("CurvatureCallback: %s is not there: its curvature is not written", checkpoint)
            return
        self._write(curvature, checkpoint, step, resumable=not args.save_only_model)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._source is None:
            return
        try:
            self._finish(self._source, args, state)
        finally:
            self._close()

    def _finish(self, source: Source, args: TrainingArguments, state: TrainerState) -> None:
        out, step = Path(str(args.output_dir)), state.global_step
        best = state.best_model_checkpoint if args.load_best_model_at_end else None
        held = Path(best) if best else out / f"checkpoint-{step}"
        is_other = best is not None and state.best_global_step != step
        if self.source != "pass" and (is_other or step == source.training.first_step):
            # The weights are those of a checkpoint, whose curvature was measured when it was written.
            if args.should_save:
                self._copy(held / STEM, out / STEM)
            return
        curvature = self._found(source.at_end, step)
        if curvature is None:
            return
        self._write(curvature, out, step, resumable=False)
        if self.source == "pass" and held.is_dir() and (best is not None or self._saved == step):
            self._write(curvature, held, step, resumable=False)

    def _found(self, make: Any, step: int) -> Curvature | None:
        try:
            found: Curvature | None = make(step)
        except GradmergeError as error:
            _log.error("CurvatureCallback: no curvature is written: %s", error)
            return None
        return found

    def _write(self, curvature: Curvature, folder: Path, step: int, resumable: bool) -> None:
        assert self._source is not None
        try:
            with Staging(folder / STEM, "curvature", force=True) as staging:
                curvature.write(staging.folder, self.precision)
                if resumable:
                    self._source.write_state(staging.folder, step)
        except (GradmergeError, OSError) as error:
            _log.error("CurvatureCallback: %s: no curvature is written: %s", folder, error)

    def _copy(self, source: Path, target: Path) -> None:
        if not source.is_dir():
            _log.warning("CurvatureCallback: %s is not there: %s is not written", source, target)
            return
        try:
            with Staging(target, "curvature", force=True) as staging:
                for path in source.iterdir():
                    if path.name != STATE:
                        shutil.copy2(path, staging.folder / path.name)
        except (GradmergeError, OSError) as error:
            _log.error("CurvatureCallback: %s is not written: %s", target, error)

    def _close(self) -> None:
        if self._source is not None:
            self._source.close()
        self._source = None


def _check_parallel(args: TrainingArguments, model: nn.Module) -> None:
    """Raise where no process holds whole parameters."""
    from torch.distributed.tensor import DTensor

    kind = _distributed_type(args)
    if kind in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP") or any(
        isinstance(p, DTensor) for p in model.parameters()
    ):
        raise InputError(
            f"CurvatureCallback: parameters are spread over processes ({kind}), and curvature is measured where each process "
            "holds them whole, as in data-parallel training (DDP). Leave the callback out, and measure the trained model: "
            "gradmerge curvature estimate."
        )


def _distributed_type(args: TrainingArguments) -> str:
    from accelerate.state import AcceleratorState  # type: ignore[import-untyped]

    if args.fsdp:
        return "FSDP"
    # The accelerator of the Trainer knows of what `accelerate launch` has set up; there is one, in every Trainer.
    return str(AcceleratorState().distributed_type.value)


def _check_replaceable(folder: Path) -> None:
    """Raise if there is something that is no curvature, which a new one would replace."""
    if not folder.exists() and not folder.is_symlink():
        return
    files = open_files(folder, STEM) if folder.is_dir() and not folder.is_symlink() else None
    if files is None:
        raise InputError(
            f"{folder}: is there, and is not a curvature folder. The curvature of the trained model is to be written there: move it "
            "away, or choose another output_dir."
        )
    close_files(files)


def _examples_in_a_step(args: TrainingArguments, state: TrainerState) -> int:
    batch = args.train_batch_size
    if args.auto_find_batch_size and state.train_batch_size:
        batch = state.train_batch_size
    return int(batch * args.gradient_accumulation_steps * args.world_size)


def _resumed_from(args: TrainingArguments, state: TrainerState) -> list[Path]:
    """Where the checkpoint may lie; the Trainer does not tell its callbacks."""
    named = args.resume_from_checkpoint
    usual = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
    given = [Path(named)] if isinstance(named, str) and Path(named).is_dir() else []
    return [*given, usual]
