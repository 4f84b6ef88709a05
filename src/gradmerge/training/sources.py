"""Where the curvature of a training run comes from: Adam's second moments, a running average, a pass over the data."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from ..curvature.curvature import Curvature
from ..curvature.files import STEM
from ..curvature.kernels import sum_type
from ..curvature.optimizers import decay_note, second_moment, token_note
from ..curvature.trial import Trial
from ..errors import GradmergeError, InputError
from . import processes
from .measuring import BatchWatch, check_labels, random_states_kept, sums_of
from .online import STATE, RunningAverage
from .subject import Subject

_log = logging.getLogger(__name__)
#: Optimizers whose `exp_avg_sq` is a running mean of squared gradients.
_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


@dataclass(frozen=True)
class Options:
    """What a user asks for."""

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
    subject: Subject
    optimizer: Any
    loader: Any
    batch: int
    """Examples in a step: of all processes and accumulated batches together."""
    first_step: int
    """Optimizer steps that were taken before this run, which resumes."""

    @property
    def name(self) -> str:
        return Path(self.args.output_dir).resolve().name

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


class Source(ABC):
    """Curvature at any moment of a training run."""

    def __init__(self, training: Training, options: Options) -> None:
        self.training = training
        self.options = options

    def begin_step(self, step: int) -> None:  # noqa: B027 - not every source needs to know
        """Optimizer step ``step``, counted from 1, begins: its batches come."""

    def before_update(self, step: int) -> None:  # noqa: B027
        """All gradients of the step are there, and the weights that they were taken at."""

    def logged(self, logs: Mapping[str, Any]) -> None:  # noqa: B027
        """The Trainer logs something."""

    @abstractmethod
    def at_checkpoint(self, step: int) -> Curvature | None:
        """The curvature after ``step`` steps, where it is known without a pass over the data. Called by all processes."""

    def at_end(self, step: int) -> Curvature | None:
        """The curvature of the trained model. Called by all processes."""
        return self.at_checkpoint(step)

    def write_state(self, folder: Path, step: int) -> None:  # noqa: B027
        """Leave what a resumed run goes on from."""

    def close(self) -> None:  # noqa: B027
        """Leave the model as it was found."""

    def _result(self, sums: Mapping[str, Tensor], examples: int, likelihood: str) -> Curvature | None:
        if not self.training.writes:
            return None
        return Curvature(self.training.subject.stored(sums), examples, likelihood, self.training.name)


class Adam(Source):
    """N·B·v̂ / s², with v̂ of Adam's state; s is what the optimizer's gradient is, in means over the examples of a step."""

    def __init__(self, training: Training, options: Options) -> None:
        super().__init__(training, options)
        self._optimizer = _adam_inside(training.optimizer)
        self._told_of_clipping = False
        self._scale = 1
        # The loss may only be out of scale where several batches make a step.
        several = training.args.gradient_accumulation_steps > 1 or processes.is_distributed()
        self._watch = BatchWatch(training.subject.model) if several else None
        for note in decay_note(self._optimizer.param_groups) + token_note(_plain(training.subject.model)):
            training.say(note)

    def begin_step(self, step: int) -> None:
        if self._watch is not None:
            self._watch.listening = True

    def before_update(self, step: int) -> None:
        if self._watch is not None:
            batches = self._watch.taken()
            self._watch.remove()
            self._watch = None
            if batches:
                self._scale = _loss_scale(self.training, batches[0])
            else:
                self.training.say(
                    "the model's inputs were not seen (torch_compile=True hides them), so that it is not known whether it averages "
                    "over all batches of a step. If it does not, the curvature from Adam's second moments is too large, by the "
                    "square of their number. Use source='pass', or a step of one batch."
                )
        # At steps 1, 2, 4, 8, … the norm is looked at, because logs may be few; a GPU would have to wait at every step.
        limit = self.training.args.max_grad_norm
        if limit and limit > 0 and not self._told_of_clipping and step & (step - 1) == 0:
            gradients = [p.grad for p in self.training.subject.model.parameters() if p.grad is not None]
            # Clipped to the limit: nothing that was shorter has just this length.
            if float(torch.nn.utils.get_total_norm(gradients)) > limit * (1 - 1e-4) - 1e-6:
                self._tell_of_clipping(limit)

    def logged(self, logs: Mapping[str, Any]) -> None:
        limit, norm = self.training.args.max_grad_norm, logs.get("grad_norm")
        if limit and limit > 0 and isinstance(norm, int | float) and norm > limit:
            self._tell_of_clipping(limit)

    def _tell_of_clipping(self, limit: float) -> None:
        if not self._told_of_clipping:
            self.training.say(
                f"gradients are clipped to the norm {limit:g} (max_grad_norm): the curvature from Adam's second moments is too "
                "small, by the square of how much they are shortened, so that its scale does not compare with other tasks'. "
                "Train with max_grad_norm=0, or use source='online' or 'pass'."
            )
        self._told_of_clipping = True

    def at_checkpoint(self, step: int) -> Curvature | None:
        subject, examples = self.training.subject, self.training.examples(step)
        moments = _moments(self._optimizer)
        if not moments:
            self.training.say("the optimizer has taken no step yet: no curvature is written")
            return None
        if not self.training.writes:
            return None
        factor = float(examples) * self.training.batch / self._scale**2
        # A parameter that Adam holds nothing for has never had a gradient.
        sums = {
            name: moments[p][0].float().mul(moments[p][1] * factor).cpu() if p in moments else torch.zeros(p.shape)
            for name, p in subject.parameters.items()
        }
        return self._result(sums, examples, "adam")

    def close(self) -> None:
        if self._watch is not None:
            self._watch.remove()


class Online(Source):
    """N·E, with E a running average over measured steps of the mean over their examples of g_i²."""

    def __init__(self, training: Training, options: Options, max_steps: int) -> None:
        super().__init__(training, options)
        if max_steps < options.every:
            raise InputError(f"every={options.every}, but training has {max_steps} steps: none would be measured")
        if training.args.torch_compile:
            raise InputError(
                "source='online' looks at the model's inputs, which torch_compile=True hides. Train without it, or use "
                "source='pass'."
            )
        self._average = RunningAverage(options.decay)
        self._watch = BatchWatch(training.subject.model)
        self._trial = Trial()
        self._measured = False

    def resume(self, folders: list[Path], step: int) -> None:
        """Go on from the checkpoint that training resumes from."""
        found = [path for folder in folders if (path := folder / STEM / STATE).is_file()]
        if found and self.training.writes:
            subject = self.training.subject
            shapes = {name: parameter.shape for name, parameter in subject.parameters.items()}
            self._average.load(found[0], step, shapes, subject.device)
        if not found and step >= self.options.every:
            self.training.say(
                f"training resumes at step {step}, but there is no {STATE} in {' or '.join(str(f / STEM) for f in folders)}: the "
                "running average begins anew. If the checkpoint lies elsewhere, name it in resume_from_checkpoint of the "
                "TrainingArguments as well."
            )
        device = self.training.subject.device
        self._average.steps = max(processes.numbers_of_all(self._average.steps, device))
        self._average.examples = max(processes.numbers_of_all(self._average.examples, device))

    def begin_step(self, step: int) -> None:
        self._watch.taken()
        self._watch.listening = step % self.options.every == 0

    def before_update(self, step: int) -> None:
        if step % self.options.every:
            return
        batches, device = self._watch.taken(), self.training.subject.device
        own = sum(len(labels) for b in batches if isinstance(labels := b.get("labels"), Tensor))
        before = sum(processes.numbers_of_all(own, device)[: processes.rank_and_number()[0]])
        sums: dict[str, Tensor] = {}
        problem: GradmergeError | None = None
        try:
            sums = sums_of(
                self.training.subject, batches, self.options.likelihood, self.options.seed,
                self._average.examples + before, self._trial,
            )  # fmt: skip
            if not bool(torch.stack([value.isfinite().all() for value in sums.values()]).all()):
                problem = InputError("squared gradients are not finite")
        except GradmergeError as error:
            problem = error
        if not _all_well(problem, device):
            self._report(problem, step)
            return
        total = sum(processes.numbers_of_all(own, device))
        processes.add_up(sums.values())
        self._average.add(sums, total, keep=self.training.writes)
        self._measured = True

    def _report(self, problem: GradmergeError | None, step: int) -> None:
        """At first an error; later, one step less in the average is no reason to lose a training run."""
        problem = problem or InputError("another process could not measure its examples")
        if not self._measured:
            self.close()
            raise problem
        _log.warning("CurvatureCallback: step %d is left out of the running average: %s", step, problem)

    def at_checkpoint(self, step: int) -> Curvature | None:
        if self._average.steps == 0:
            self.training.say(f"no step has been measured yet (every={self.options.every}): no curvature is written")
            return None
        examples = self.training.examples(step)
        sums = {name: (mean * examples).cpu() for name, mean in self._average.means()}
        return self._result(sums, examples, self.options.likelihood)

    def write_state(self, folder: Path, step: int) -> None:
        self._average.save(folder / STATE, step)

    def close(self) -> None:
        self._watch.remove()


class Pass(Source):
    """Σ_i g_i² over the first ``limit`` training examples, at the weights that training ends with."""

    def __init__(self, training: Training, options: Options) -> None:
        super().__init__(training, options)
        data = training.loader.dataset
        if isinstance(data, IterableDataset) or not isinstance(data, Sized) or not hasattr(data, "__getitem__"):
            raise InputError(
                "source='pass' needs training data with a length, whose examples are found by number. Use source='online' for "
                "data that is streamed."
            )
        with random_states_kept(training.subject.device):
            check_labels(training.loader.collate_fn([data[0]]))

    def at_checkpoint(self, step: int) -> Curvature | None:
        return None

    def at_end(self, step: int) -> Curvature | None:
        subject, args = self.training.subject, self.training.args
        data = self.training.loader.dataset
        total = len(data) if self.options.limit is None else min(self.options.limit, len(data))
        rows = processes.share(total)
        sums = {n: torch.zeros_like(p, dtype=sum_type(p)).detach() for n, p in subject.parameters.items()}
        problem: GradmergeError | None = None
        try:
            if rows:
                # Workers and collators that draw random numbers draw the same ones every time.
                with random_states_kept(subject.device):
                    torch.manual_seed(self.options.seed)
                    loader = DataLoader(
                        Subset(data, rows),
                        batch_size=self.options.batch_size or args.per_device_train_batch_size,
                        collate_fn=self.training.loader.collate_fn,
                        num_workers=args.dataloader_num_workers,
                    )
                    found = sums_of(subject, loader, self.options.likelihood, self.options.seed, rows.start)
                sums |= found
        except GradmergeError as error:
            problem = error
        if not _all_well(problem, subject.device):
            raise problem or InputError("another process could not measure its examples")
        processes.add_up(sums.values())
        return self._result(sums, total, self.options.likelihood)


def _adam_inside(optimizer: Any) -> torch.optim.Optimizer:
    inner = optimizer
    while not isinstance(inner, _ADAMS) and isinstance(getattr(inner, "optimizer", None), torch.optim.Optimizer):
        inner = inner.optimizer
    if not isinstance(inner, _ADAMS):
        raise InputError(
            f"source='adam' needs the second moments of Adam or AdamW as PyTorch keeps them (optim='adamw_torch' or "
            f"'adamw_torch_fused', or gm.PriorAdamW); the optimizer is {type(inner).__module__}.{type(inner).__name__}. Use "
            "source='online' or 'pass', which measure gradients themselves."
        )
    return inner


def _moments(optimizer: torch.optim.Optimizer) -> dict[Tensor, tuple[Tensor, float]]:
    """exp_avg_sq and 1 / (1 − β₂^step), of every parameter that has been updated."""
    found: dict[Tensor, tuple[Tensor, float]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moment = second_moment(optimizer.state.get(parameter), float(group["betas"][1]))
            if moment is not None:
                found[parameter] = moment
    return found


def _loss_scale(training: Training, batch: dict[str, Any]) -> int:
    """How many times the mean gradient of a step's examples the optimizer's gradient is.

    The Trainer gives a model `num_items_in_batch`, the number of labels in the whole step, for it to divide its loss by, and
    then adds up the losses of accumulated batches and of processes. Where the model takes its own batch's mean all the same, the
    sum is so many times too large. That is found out by telling the model another number.
    """
    items = batch.get("num_items_in_batch")
    if items is None or "labels" not in batch:
        return 1
    with _as_for_evaluation(training.subject), torch.no_grad():
        losses = [_loss(training.subject.model(**batch | {"num_items_in_batch": n})) for n in (items, 2 * items)]
    one, two = losses
    if one is None or two is None or abs(one - two) > 1e-3 * abs(one):
        return 1
    args = training.args
    together = processes.rank_and_number()[1] if args.average_tokens_across_devices else 1
    return int(args.gradient_accumulation_steps) * together


def _loss(output: Any) -> float | None:
    loss = output.get("loss") if isinstance(output, Mapping) else output[0] if isinstance(output, tuple) else None
    return float(loss) if isinstance(loss, Tensor) and loss.numel() == 1 else None


@contextmanager
def _as_for_evaluation(subject: Subject) -> Iterator[None]:
    modes = [(module, module.training) for module in subject.model.modules()]
    with random_states_kept(subject.device):
        try:
            subject.model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def _all_well(problem: GradmergeError | None, device: torch.device) -> bool:
    return not any(processes.numbers_of_all(int(problem is not None), device))


def _plain(model: nn.Module) -> nn.Module:
    inner = getattr(model, "get_base_model", None)
    return inner() if callable(inner) else model
