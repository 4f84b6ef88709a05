"""Where the curvature of a training run comes from: Adam's second moments, a running average, a pass over the data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from ..curvature.checkpoint_names import is_adapted
from ..curvature.curvature import Curvature
from ..curvature.format import STEM
from ..curvature.kernels import sum_type
from ..curvature.optimizer_state import decay_note, second_moment, token_note
from ..curvature.verify import Trial
from ..errors import GradmergeError, InputError
from . import trainer_processes as processes
from .curvature_targets import MeasuredTensors
from .mid_training import BatchWatch, check_labels, modes_kept, random_states_kept, squared_gradients
from .running_average import STATE, RunningAverage

_log = logging.getLogger(__name__)
#: Optimizers whose `exp_avg_sq` is a running mean of squared gradients.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


@dataclass(frozen=True)
class CallbackOptions:
    """What a user asks for: arguments of CurvatureCallback."""

    every: int
    decay: float
    likelihood: str
    limit: int | None
    batch_size: int | None
    seed: int


@dataclass
class Training:
    """A training run as the Trainer's callbacks see it."""

    args: Any
    measured: MeasuredTensors
    optimizer: Any
    loader: Any
    batch: int
    """Examples in a step: of all processes and accumulated batches together."""
    first_step: int
    """Optimizer steps taken before this run began; more than 0 if it resumes."""

    @property
    def writes(self) -> bool:
        return bool(self.args.should_save)

    def examples(self, step: int) -> int:
        """The number of training examples; of data without a length, those that were seen in ``step`` steps."""
        try:
            return len(self.loader.dataset)
        except TypeError:
            return step * self.batch

    def say(self, text: str) -> None:
        if self.writes:
            _log.warning("CurvatureCallback: %s", text)


class Origin:
    """Follows a training run step by step, and gives its curvature at checkpoints and at the end."""

    def __init__(self, training: Training, options: CallbackOptions) -> None:
        self.training = training
        self.options = options

    def begin_step(self, step: int) -> None:
        """Optimizer step ``step``, counted from 1, begins: its batches come."""

    def before_update(self, step: int) -> None:
        """All gradients of the step are there, and the weights that they were taken at."""

    def logged(self, logs: Mapping[str, Any]) -> None:
        """The Trainer logs something."""

    def at_checkpoint(self, step: int) -> Curvature | None:
        """The curvature after ``step`` steps, if it is known without a pass over the data. All processes call it."""
        return None

    def at_end(self, step: int) -> Curvature | None:
        """The curvature of the trained model. All processes call it."""
        return self.at_checkpoint(step)

    def write_state(self, folder: Path, step: int) -> None:
        """Leave what a resumed run goes on from."""

    def close(self) -> None:
        """Leave the model as it was found."""

    def _result(self, sums: Mapping[str, Tensor], examples: int, likelihood: str) -> Curvature | None:
        if not self.training.writes:
            return None
        name = Path(self.training.args.output_dir).resolve().name
        return Curvature(self.training.measured.stored(sums), examples, likelihood, name)

    def _summed(self, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Add up the sums that every process makes from its own examples. If one fails, all of them raise."""
        sums: dict[str, Tensor] = {}
        problem: GradmergeError | None = None
        try:
            sums = make()
        except GradmergeError as error:
            problem = error
        if any(processes.numbers_of_all(int(problem is not None), self.training.measured.device)):
            raise problem or InputError("another process failed on its examples")
        processes.add_up(sums.values())
        return sums


class FromAdam(Origin):
    """N·B·v̂ / s², with N examples, B in a step, and v̂ from Adam's state.

    The optimizer's gradient is s times the mean gradient of a step's examples: s is 1 unless losses of several batches
    are added up where they should be averaged.
    """

    def __init__(self, training: Training, options: CallbackOptions) -> None:
        super().__init__(training, options)
        self._optimizer = _adam_inside(training.optimizer)
        self._scale = 1
        self._limit = float(training.args.max_grad_norm or 0)
        """The norm that gradients are clipped to; 0 without clipping, and once it has been told."""
        # The loss can be out of scale only if several batches make a step.
        several = training.args.gradient_accumulation_steps > 1 or processes.is_distributed()
        self._watch = BatchWatch(training.measured.model) if several else None
        model: Any = training.measured.model
        plain = model.get_base_model() if is_adapted(model) else model
        for note in decay_note(self._optimizer.param_groups) + token_note(plain):
            training.say(note)

    def begin_step(self, step: int) -> None:
        if self._watch is not None:
            self._watch.listening = True

    def before_update(self, step: int) -> None:
        if self._watch is not None:
            batches = self._watch.taken()
            self.close()
            if batches:
                self._scale = loss_scale(self.training.args, self.training.measured.model, batches[0])
            else:
                self.training.say(
                    "the model's inputs were not seen (torch_compile=True hides them), so that it is not known whether "
                    "it averages over all batches of a step. If it does not, the curvature from Adam's second moments "
                    "is too large, by the square of their number. Use source='pass', or a step of one batch."
                )
        # Logs may be few, and looking at every step would make a GPU wait: steps 1, 2, 4, 8, … are looked at.
        if self._limit > 0 and step & (step - 1) == 0:
            gradients = [p.grad for p in self.training.measured.model.parameters() if p.grad is not None]
            # Gradients are clipped already: those of just this norm were longer.
            if float(torch.nn.utils.get_total_norm(gradients)) > self._limit * (1 - 1e-4) - 1e-6:
                self._tell_of_clipping()

    def logged(self, logs: Mapping[str, Any]) -> None:
        norm = logs.get("grad_norm")
        if self._limit > 0 and isinstance(norm, int | float) and norm > self._limit:
            self._tell_of_clipping()

    def _tell_of_clipping(self) -> None:
        self.training.say(
            f"gradients are clipped to the norm {self._limit:g} (max_grad_norm): the curvature from Adam's second "
            "moments is too small, by the square of how much they are shortened, so that its scale does not compare "
            "with other tasks'. Train with max_grad_norm=0, or use source='online' or 'pass'."
        )
        self._limit = 0.0

    def at_checkpoint(self, step: int) -> Curvature | None:
        examples = self.training.examples(step)
        moments = {
            parameter: moment
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            if (moment := second_moment(self._optimizer.state.get(parameter), float(group["betas"][1]))) is not None
        }
        if not moments:
            self.training.say("the optimizer has taken no step yet: no curvature is written")
            return None
        if not self.training.writes:
            return None
        factor = float(examples) * self.training.batch / self._scale**2
        # A parameter that Adam holds nothing for has never had a gradient.
        sums = {
            name: moments[p][0].float().mul(moments[p][1] * factor).cpu() if p in moments else torch.zeros(p.shape)
            for name, p in self.training.measured.parameters.items()
        }
        return self._result(sums, examples, "adam")

    def close(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


class FromRunningAverage(Origin):
    """N·E, where E is a running average, over every ``every``-th step, of the mean of g_i² over a step's examples."""

    def __init__(self, training: Training, options: CallbackOptions, max_steps: int) -> None:
        super().__init__(training, options)
        if max_steps < options.every:
            raise InputError(f"every={options.every}, but training has {max_steps} steps: none would be used")
        if training.args.torch_compile:
            raise InputError(
                "source='online' looks at the model's inputs, which torch_compile=True hides. Train without it, or use "
                "source='pass'."
            )
        self._average = RunningAverage(options.decay)
        self._watch = BatchWatch(training.measured.model)
        self._trial = Trial()
        self._has_measured = False

    def resume(self, folders: list[Path], step: int) -> None:
        """Go on from the checkpoint that training resumes from."""
        found = [path for folder in folders if (path := folder / STEM / STATE).is_file()]
        measured = self.training.measured
        if found and self.training.writes:
            shapes = {name: parameter.shape for name, parameter in measured.parameters.items()}
            self._average.load(found[0], step, shapes, measured.device)
        if not found and step >= self.options.every:
            self.training.say(
                f"training resumes at step {step}, but there is no {STATE} in "
                f"{' or '.join(str(f / STEM) for f in folders)}: the running average begins anew. If the checkpoint "
                "lies elsewhere, name it in resume_from_checkpoint of the TrainingArguments as well."
            )
        self._average.steps = max(processes.numbers_of_all(self._average.steps, measured.device))
        self._average.examples = max(processes.numbers_of_all(self._average.examples, measured.device))

    def begin_step(self, step: int) -> None:
        self._watch.taken()
        self._watch.listening = step % self.options.every == 0

    def before_update(self, step: int) -> None:
        if step % self.options.every:
            return
        measured, batches = self.training.measured, self._watch.taken()
        own = sum(len(labels) for b in batches if isinstance(labels := b.get("labels"), Tensor))
        counts = processes.numbers_of_all(own, measured.device)
        first = self._average.examples + sum(counts[: processes.rank_and_number()[0]])

        def make() -> dict[str, Tensor]:
            likelihood, seed = self.options.likelihood, self.options.seed
            sums = squared_gradients(measured, batches, likelihood, seed, first, self._trial)
            if not bool(torch.stack([value.isfinite().all() for value in sums.values()]).all()):
                raise InputError("squared gradients are not finite")
            return sums

        try:
            sums = self._summed(make)
        except GradmergeError as problem:
            # At first an error; later, one step less in the average is no reason to lose a training run.
            if not self._has_measured:
                self.close()
                raise
            _log.warning("CurvatureCallback: step %d is left out of the running average: %s", step, problem)
            return
        self._average.add(sums, sum(counts), keep=self.training.writes)
        self._has_measured = True

    def at_checkpoint(self, step: int) -> Curvature | None:
        if self._average.steps == 0:
            self.training.say(f"no step has been used yet (every={self.options.every}): no curvature is written")
            return None
        examples = self.training.examples(step)
        sums = {name: (mean * examples).cpu() for name, mean in self._average.means()}
        return self._result(sums, examples, self.options.likelihood)

    def write_state(self, folder: Path, step: int) -> None:
        self._average.save(folder / STATE, step)

    def close(self) -> None:
        self._watch.remove()


class FromPass(Origin):
    """Σ_i g_i² over the first ``limit`` training examples, at the weights that training ends with."""

    def __init__(self, training: Training, options: CallbackOptions) -> None:
        super().__init__(training, options)
        data = training.loader.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise InputError(
                "source='pass' needs training data with a length, whose examples are found by number. Use "
                "source='online' for data that is streamed."
            )
        with random_states_kept(training.measured.device):
            check_labels(training.loader.collate_fn([data[0]]))

    def at_end(self, step: int) -> Curvature | None:
        measured, options, args = self.training.measured, self.options, self.training.args
        data = self.training.loader.dataset
        total = len(data) if options.limit is None else min(options.limit, len(data))
        rows = processes.share(total)

        def make() -> dict[str, Tensor]:
            if not rows:
                return {n: torch.zeros_like(p, dtype=sum_type(p)).detach() for n, p in measured.parameters.items()}
            # Workers and collators that draw random numbers draw the same ones every time.
            with random_states_kept(measured.device):
                torch.manual_seed(options.seed)
                loader = DataLoader(
                    Subset(data, rows),
                    batch_size=options.batch_size or args.per_device_train_batch_size,
                    collate_fn=self.training.loader.collate_fn,
                    num_workers=args.dataloader_num_workers,
                )
                return squared_gradients(measured, loader, options.likelihood, options.seed, rows.start, Trial())

        return self._result(self._summed(make), total, options.likelihood)


def _adam_inside(optimizer: Any) -> torch.optim.Optimizer:
    inner = optimizer
    while not isinstance(inner, _ADAMS) and isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, _ADAMS):
        raise InputError(
            "source='adam' needs the second moments of Adam or AdamW as PyTorch keeps them (optim='adamw_torch' or "
            f"'adamw_torch_fused', or gm.PriorAdamW); the optimizer is {type(inner).__module__}."
            f"{type(inner).__name__}. Use source='online' or 'pass', which take gradients themselves."
        )
    return inner


def loss_scale(args: Any, model: nn.Module, batch: dict[str, Any]) -> int:
    """s: the optimizer's gradient is s times the mean gradient of a step's examples.

    The Trainer adds up the losses of accumulated batches and of processes, and expects a model to divide each by
    `num_items_in_batch`, the number of labels in the whole step. A model that divides by the number in its own batch
    makes the sum too large, by the number of batches. Told another number, such a model gives the same loss.
    """
    items = batch.get("num_items_in_batch")
    if items is None or "labels" not in batch:
        return 1
    device = next(model.parameters()).device
    with random_states_kept(device), modes_kept(model), torch.no_grad():
        model.eval()
        one, two = (_loss(model(**batch | {"num_items_in_batch": n})) for n in (items, 2 * items))
    if one is None or two is None or abs(one - two) > 1e-3 * abs(one):
        return 1
    together = processes.rank_and_number()[1] if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps) * together


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None
