"""Estimating curvature: gradmerge against a plain forward and backward pass, and against other exact ways to the sums.

    python -m benchmarks.curvature --model minilm --device cpu --json curvature-cpu.json

makes a model with random weights and batches of random tokens, and has every way add up Σ_i [∇ℓ_i]², the squared
gradients of single examples. First each is compared with the loop over examples on a few of them, parameter by
parameter; then all are timed in turn, each next to the plain pass, so that noise hits both. `kronecker` adds up the
Kronecker factors of the linear layers instead, and is compared with a loop that does the same. torch.func needs nothing
beside torch; Opacus and BackPACK are skipped where they are not installed:

    pip install --no-deps -c benchmarks/constraints-curvature.txt opacus backpack-for-pytorch
    pip install -c benchmarks/constraints-curvature.txt opt_einsum einops scipy unfoldNd

A peer may have several settings (torch.func, for one, cannot handle every attention mask). The setting that gets most
parameters right is timed; of several, the fastest counts. Speed never decides the exit status.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import itertools
import json
import logging
import math
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradmerge as gm
from gradmerge.curvature.estimate import estimate_curvature
from gradmerge.curvature.kfac import MAX_KRONECKER_DIM

Batch = dict[str, Tensor]
Sums = dict[str, Tensor]
Add = Callable[[Batch, Sums], None]
"""Adds Σ_i g_i² of a batch's examples to sums by parameter. A parameter that it cannot do stays away."""

#: A sum is wrong from this error on, |sum − loop's| over |loop's|, both added up over a parameter's entries.
WRONG = 1e-3
#: Softmax does not see a bias of all keys: its gradient is 0, and what is computed is rounding.
ZERO_GRADIENT = ("key.bias", "k_proj.bias")
#: Batches that are timed in one repeat, of every way and of the plain pass beside it; the loop gets one.
BATCHES = 3

#: The bars: time over the plain pass per (device, model), of the diagonal and of Kronecker factors, the loop's time
#: over ours, and peak memory over that of the plain pass and a float32 copy of the parameters together.
SLOWER = {
    ("cpu", "minilm"): 1.8,
    ("cpu", "mixtral"): 2.5,
    ("cpu", "gpt-oss"): 2.5,
    ("cuda", "minilm"): 2.2,
    ("cuda", "gpt2"): 1.5,
    ("cuda", "llama-1b"): 1.35,
}
KRONECKER_SLOWER = {("cpu", "minilm"): 1.6, ("cuda", "gpt2"): 1.4}
LOOP_OVER_OURS = {("cuda", "minilm"): 8.0}
MEMORY = 1.1


@dataclass(frozen=True)
class Size:
    layers: int
    batch: int
    tokens: int
    vocabulary: int


SIZES = {
    "minilm": Size(6, 16, 128, 30522),
    "gpt2": Size(12, 16, 1024, 50257),
    "llama-1b": Size(22, 8, 1024, 32000),
    "mixtral": Size(4, 8, 128, 4000),
    "gpt-oss": Size(4, 8, 128, 4000),
}


@dataclass
class Result:
    """What is said of one way. Seconds are medians of the repeats; the ratio is the median of each repeat's own."""

    seconds_per_batch: float | None = None
    ratio_to_plain: float | None = None
    examples_per_second: float | None = None
    error: float | None = None
    """The largest of all parameters that it can do."""
    worst: str | None = None
    wrong_parameters: int | None = None
    """Those it cannot do, and those it gets wrong."""
    missing_parameters: int | None = None
    wrong_names: list[str] = field(default_factory=list)
    examples_timed: int | None = None
    """Of a batch, where the time of fewer was scaled up."""
    first_batch_s: float | None = None
    setting: str = ""
    tried: list[dict[str, Any]] = field(default_factory=list)
    note: str = ""
    seconds: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)


@dataclass
class Bar:
    """A number that was asked for, and the number that was measured."""

    what: str
    value: float
    sense: str
    limit: float
    holds: bool

    @classmethod
    def at_most(cls, what: str, value: float, limit: float) -> Bar:
        return cls(what, value, "≤", limit, value <= limit)

    @classmethod
    def at_least(cls, what: str, value: float, limit: float) -> Bar:
        return cls(what, value, "≥", limit, value >= limit)


@dataclass(frozen=True)
class Setting:
    """One way to have a peer do it, made for a copy of the model."""

    words: str
    make: Callable[[nn.Module], Add]


# Models and batches.


def make_model(name: str, layers: int) -> nn.Module:
    """Random weights; no dropout, so that the mode of the model makes no difference."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        GptOssConfig,
        GptOssForCausalLM,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
    )

    torch.manual_seed(0)
    config: Any
    if name == "minilm":
        sizes = {"hidden_size": 384, "num_hidden_layers": layers, "num_attention_heads": 12, "intermediate_size": 1536}
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
        config = BertConfig(**sizes, **dropout, num_labels=2)
        return BertForSequenceClassification(config).train()
    if name == "gpt2":
        config = GPT2Config(n_layer=layers, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
        return GPT2LMHeadModel(config).train()
    if name in ("mixtral", "gpt-oss"):  # small ones
        sizes = {"hidden_size": 256, "num_hidden_layers": layers, "intermediate_size": 512, "vocab_size": 4000}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}
        sizes |= {"num_local_experts": 8, "num_experts_per_tok": 2}
        if name == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**sizes, use_cache=False)).train()
        return GptOssForCausalLM(GptOssConfig(**sizes, use_cache=False)).train()
    sizes = {"hidden_size": 2048, "num_hidden_layers": layers, "intermediate_size": 5632, "vocab_size": 32000}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=2048, use_cache=False)
    return LlamaForCausalLM(config).train()


def make_batches(name: str, size: Size, count: int, device: torch.device) -> list[Batch]:
    """A sentence classifier gets a mask, as tokenizers give it; language models get full blocks of tokens."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(count):
        ids = torch.randint(1000, size.vocabulary, (size.batch, size.tokens), generator=generator)
        if name == "minilm":
            labels = torch.randint(0, 2, (size.batch,), generator=generator)
            batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
        else:
            batch = {"input_ids": ids, "labels": ids.clone()}
        batches.append({key: value.to(device) for key, value in batch.items()})
    return batches


def loss_sum(forward: Callable[..., Any], batch: Batch) -> Tensor:
    """Σ_i ℓ_i; of a language model, summed over the next tokens."""
    logits = forward(**{key: value for key, value in batch.items() if key != "labels"}).logits.float()
    labels = batch["labels"]
    if labels.dim() == 2:
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        logits = logits.flatten(0, 1)
    return F.cross_entropy(logits, labels.flatten(), reduction="sum")


def rows(batch: Batch, first: int, last: int) -> Batch:
    return {key: value[first:last] for key, value in batch.items()}


def with_positions(batch: Batch) -> Batch:
    """Positions repeated for every example: a layer whose input has no axis of examples has no example's gradient."""
    ids = batch["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids).contiguous()
    return batch | {"position_ids": positions}


def without_mask(batch: Batch) -> Batch:
    return {key: value for key, value in batch.items() if key != "attention_mask"}


# The ways.


def plain(model: nn.Module, batch: Batch) -> None:
    """A training step without its optimizer."""
    model.zero_grad(set_to_none=True)
    loss_sum(model, batch).backward()


def put(sums: Sums, name: str, value: Tensor) -> None:
    if name in sums:
        sums[name] += value
    else:
        sums[name] = value


def loop_way(model: nn.Module) -> Add:
    def add(batch: Batch, sums: Sums) -> None:
        for row in range(len(batch["labels"])):
            plain(model, rows(batch, row, row + 1))
            for name, parameter in model.named_parameters():
                if parameter.grad is None:
                    continue
                if name not in sums:
                    sums[name] = torch.zeros_like(parameter, dtype=torch.float32, requires_grad=False)
                gradient = parameter.grad.float()
                sums[name].addcmul_(gradient, gradient)

    return add


def kronecker_loop_way(model: nn.Module) -> Add:
    """Σ x̃x̃ᵀ and Σ yyᵀ of every linear layer whose weight is its own, under the names of files; squares of the rest."""
    holders = [parameter for module in model.modules() for parameter in module._parameters.values()]
    layers = {
        f"{path}.weight": module
        for path, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        if sum(holder is module.weight for holder in holders) == 1 and max(module.weight.shape) <= MAX_KRONECKER_DIM
    }
    biases = {name.removesuffix("weight") + "bias" for name in layers}
    squares = loop_way(model)

    def add(batch: Batch, sums: Sums) -> None:
        def see(name: str, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0].detach().flatten(0, -2).float()
            x = x if module.bias is None else F.pad(x, (0, 1), value=1.0)
            put(sums, f"{name}.A", x.T @ x)
            output.register_hook(
                lambda y: put(sums, f"{name}.G", y.flatten(0, -2).float().T @ y.flatten(0, -2).float())
            )

        hooks = [layer.register_forward_hook(partial(see, name)) for name, layer in layers.items()]
        try:
            squares(batch, sums)
        finally:
            for hook in hooks:
                hook.remove()
            for name in layers.keys() | biases:
                sums.pop(name, None)

    return add


def vmap_way(model: nn.Module, change: Callable[[Batch], Batch], attention: str | None, chunk: int | None) -> Add:
    if attention is not None:
        model.set_attn_implementation(attention)  # type: ignore[operator]
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(values: Mapping[str, Tensor], example: Batch) -> Tensor:
        def forward(**inputs: Tensor) -> Any:
            return torch.func.functional_call(model, dict(values), (), inputs)

        return loss_sum(forward, {key: value[None] for key, value in example.items()})

    gradients_of = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))

    def add(batch: Batch, sums: Sums) -> None:
        batch = change(batch)
        examples = len(batch["labels"])
        for first in range(0, examples, chunk or examples):
            gradients = gradients_of(parameters, rows(batch, first, first + (chunk or examples)))
            for name in list(gradients):
                put(sums, name, gradients.pop(name).float().square_().sum(0))

    return add


def opacus_way(model: nn.Module, change: Callable[[Batch], Batch]) -> Add:
    from opacus import GradSampleModule

    wrapped = GradSampleModule(model, loss_reduction="sum")

    def add(batch: Batch, sums: Sums) -> None:
        model.zero_grad(set_to_none=True)
        loss_sum(wrapped, change(batch)).backward()
        for name, parameter in model.named_parameters():
            gradients = getattr(parameter, "grad_sample", None)
            if isinstance(gradients, Tensor):
                put(sums, name, gradients.float().square_().sum(0))
            parameter.grad_sample = None  # type: ignore[attr-defined]

    return add


def backpack_way(model: nn.Module, change: Callable[[Batch], Batch], extension: str, whole: bool) -> Add:
    import backpack
    from backpack import extensions

    if whole:
        backpack.extend(model)
    else:
        for module in model.modules():
            if type(module) is nn.Linear or (type(module) is nn.Embedding and module.padding_idx is None):
                backpack.extend(module)

    def add(batch: Batch, sums: Sums) -> None:
        model.zero_grad(set_to_none=True)
        quantity = getattr(extensions, extension)()
        with backpack.backpack(quantity):
            loss_sum(model, change(batch)).backward()
        for name, parameter in model.named_parameters():
            value = getattr(parameter, quantity.savefield, None)
            if value is not None:
                each = extension == "BatchGrad"
                put(sums, name, value.float().square_().sum(0) if each else value.detach().float())
                delattr(parameter, quantity.savefield)

    return add


def same(batch: Batch) -> Batch:
    return batch


PEERS: dict[str, list[Setting]] = {
    "vmap": [
        Setting("as it is", partial(vmap_way, change=same, attention=None, chunk=None)),
        Setting("no mask", partial(vmap_way, change=without_mask, attention=None, chunk=None)),
        Setting("no mask, eager attention", partial(vmap_way, change=without_mask, attention="eager", chunk=None)),
        Setting(
            "no mask, eager attention, 4 examples at a time",
            partial(vmap_way, change=without_mask, attention="eager", chunk=4),
        ),
    ],
    "opacus": [
        Setting("as it is", partial(opacus_way, change=same)),
        Setting("positions given for every example", partial(opacus_way, change=with_positions)),
    ],
    "backpack": [
        Setting("whole model", partial(backpack_way, change=with_positions, extension="SumGradSquared", whole=True)),
        *(
            Setting(
                f"{extension} of linear and embedding layers, positions given for every example",
                partial(backpack_way, change=with_positions, extension=extension, whole=False),
            )
            for extension in ("SumGradSquared", "BatchGrad")
        ),
    ],
}
METHODS = ("ours", "kronecker", "loop", *PEERS)


# Right or wrong.


def errors(got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """|got − wanted| over |wanted|, both added up over a parameter; infinite where there is nothing."""
    found = {}
    for name, right in wanted.items():
        value = got.get(name)
        if value is None or value.shape != right.shape:
            found[name] = math.inf
            continue
        difference = float((value.to(right) - right).abs().mean())
        scale = size_of(name, wanted)
        found[name] = difference / scale if scale else (math.inf if difference else 0.0)
    return {name: error if not math.isnan(error) else math.inf for name, error in found.items()}


def size_of(name: str, sums: Mapping[str, Tensor]) -> float:
    """The mean of a parameter's sums; where it is 0 but for rounding, the largest of the biases beside it."""
    if not name.endswith(ZERO_GRADIENT):
        return float(sums[name].abs().mean())
    layer = name.rsplit(".", 2)[0] + "."
    return max(float(s.mean()) for other, s in sums.items() if other.startswith(layer) and other.endswith(".bias"))


class Judge:
    """The loop's sums over a few examples, in float32 (or wider) whatever the model's type is.

    In 16 bits the loop's own sums are off by rounding; there a sum is wrong if it is off by more than twice that.
    """

    def __init__(self, model: nn.Module, batch: Batch, way: Callable[[nn.Module], Add] = loop_way) -> None:
        self.batch = batch
        self.limits: dict[str, float] = {}
        wide = all(parameter.dtype == torch.float32 for parameter in model.parameters())
        reference = model if wide else copy.deepcopy(model).float()
        self.wanted: Sums = {}
        way(reference)(batch, self.wanted)
        reference.zero_grad(set_to_none=True)
        own: Sums = {}
        if not wide:
            way(model)(batch, own)
            model.zero_grad(set_to_none=True)
        self.loop = errors(own, self.wanted) if own else dict.fromkeys(self.wanted, 0.0)
        self.limits = {name: WRONG + 2 * error for name, error in self.loop.items()}

    def judge(self, found: Mapping[str, float]) -> dict[str, Any]:
        missing = [name for name, error in found.items() if math.isinf(error)]
        wrong = [name for name, error in found.items() if not error <= self.limits[name]]
        able = {name: error for name, error in found.items() if math.isfinite(error)}
        worst = max(able, key=able.__getitem__, default=None)
        return {
            "error": able[worst] if worst is not None else None,
            "worst": worst,
            "wrong_parameters": len(wrong),
            "missing_parameters": len(missing),
            "wrong_names": wrong[:8] + (["…"] if len(wrong) > 8 else []),
        }


# Time and memory.


@dataclass
class Clock:
    device: torch.device

    def now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def timed(self, action: Callable[[], Any]) -> float:
        begun = self.now()
        action()
        return self.now() - begun


def time_ours(
    model: nn.Module, batches: Sequence[Batch], clock: Clock, kind: str = "diagonal"
) -> tuple[float, list[float]]:
    """(seconds of the first batch, with setting up and the trial of two examples; seconds of each later batch)."""
    stamps = [clock.now()]
    estimate_curvature(model, batches, kind=kind, each_batch=lambda _: stamps.append(clock.now()))
    first, *later = (after - before for before, after in itertools.pairwise(stamps))
    return first, later


def memory(model: nn.Module, batches: Sequence[Batch], device: torch.device, kronecker: bool) -> dict[str, int]:
    """Peaks of CUDA memory, the model's weights included."""

    def peak(action: Callable[[], Any]) -> int:
        model.zero_grad(set_to_none=True)
        free()
        torch.cuda.reset_peak_memory_stats(device)
        action()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device)

    first: list[int] = []

    def reset(_: Any) -> None:
        first.append(torch.cuda.max_memory_allocated(device))
        torch.cuda.reset_peak_memory_stats(device)

    def all_plain() -> None:
        for batch in batches:
            plain(model, batch)

    plain_peak = peak(all_plain)
    later = peak(lambda: estimate_curvature(model, [*batches, *batches], each_batch=reset))
    factors: dict[str, int] = {}
    if kronecker:
        found: list[gm.Curvature] = []
        twice = [*batches, *batches]
        factors["kronecker_peak_bytes"] = peak(
            lambda: found.append(gm.estimate_curvature(model, twice, kind="kronecker"))
        )
        factors["kronecker_sum_bytes"] = sum(value.nbytes for value in found[0].values())
    return {
        "plain_peak_bytes": plain_peak,
        "ours_peak_bytes": max(*first, later),
        "ours_peak_bytes_after_first_batch": max(*first[1:], later),
        "float32_parameter_bytes": sum(4 * parameter.numel() for parameter in model.parameters()),
        **factors,
    }


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Benchmark:
    """One model, its batches, and what every way does with them."""

    def __init__(self, name: str, size: Size, device: torch.device, dtype: torch.dtype, options: Any) -> None:
        self.name, self.size, self.device, self.repeats = name, size, device, options.repeats
        self.model = make_model(name, size.layers).to(device, dtype)
        self.batches = make_batches(name, size, BATCHES, device)
        self.clock = Clock(device)
        self.results: dict[str, Result] = {"plain": Result(note="the sum of all losses; a training step, no optimizer")}
        self.sides: dict[str, Callable[[], list[float]]] = {}
        """What is timed: each gives the seconds per batch that it measured."""
        self.memory: dict[str, int] = {}
        self.check_examples = min(options.check_examples, size.batch)
        self.loop_examples = min(2, size.batch) if device.type == "cuda" and name != "minilm" else size.batch

    def run(self, methods: Sequence[str]) -> None:
        say(f"warming up {self.name}")
        plain(self.model, self.batches[0])
        time_ours(self.model, self.batches[:2], self.clock)
        if self.device.type == "cuda":
            self.memory = memory(self.model, self.batches[:1], self.device, "kronecker" in methods)
        say(f"the loop over {self.check_examples} examples, to compare with")
        self.judge = Judge(self.model, rows(self.batches[0], 0, self.check_examples))
        for method in methods:
            if method == "ours":
                self.add_ours("ours", self.judge)
            elif method == "kronecker":
                self.add_ours("kronecker", Judge(self.model, self.judge.batch, kronecker_loop_way), "kronecker")
            elif method == "loop":
                self.add_loop()
            else:
                self.add_peer(method)
        for number in range(self.repeats):
            self.measure(number)
        self.summarise()

    def add_ours(self, name: str, judge: Judge, kind: str = "diagonal") -> None:
        with warnings_of("gradmerge") as notes:
            sums: Any = gm.estimate_curvature(self.model, [judge.batch], kind=kind)
        judgement = judge.judge(errors(dict(sums.items()), judge.wanted))
        result = self.results[name] = Result(**judgement, note="; ".join(notes))
        firsts: list[float] = []

        def measure() -> list[float]:
            first, later = time_ours(self.model, [self.batches[0], *self.batches], self.clock, kind)
            firsts.append(first)
            result.first_batch_s = statistics.median(firsts)
            return later

        self.sides[name] = measure

    def add_loop(self) -> None:
        count = self.loop_examples
        result = self.results["loop"] = Result(**self.judge.judge(self.judge.loop))
        result.note = "what the others are held against"
        if count < self.size.batch:
            result.examples_timed = count
        add, sums, batch = loop_way(self.model), Sums(), rows(self.batches[0], 0, count)
        add(rows(batch, 0, 1), sums)
        self.sides["loop"] = lambda: [self.clock.timed(lambda: add(batch, sums)) * self.size.batch / count]

    def add_peer(self, name: str) -> None:
        result = self.results[name] = Result()
        if name != "vmap" and find_spec(name) is None:
            result.note = "not installed"
            return
        best: tuple[tuple[int, float], Add, Sums] | None = None
        for setting in PEERS[name]:
            say(f"trying {name}: {setting.words}")
            try:
                add, sums, judgement, seconds = self.attempt(setting)
            except Exception as error:  # a peer may fail in any way; what it says is a result
                result.tried.append({"setting": setting.words, "failed": in_short(error)})
                continue
            finally:
                free()
            result.tried.append({"setting": setting.words, "seconds": seconds} | judgement)
            rank = (judgement["wrong_parameters"], seconds)
            if best is None or rank < best[0]:
                best, result.setting = (rank, add, sums), setting.words
                for key, value in judgement.items():
                    setattr(result, key, value)
        if best is None:
            result.note = result.tried[-1]["failed"]
            return
        if result.missing_parameters:
            result.note = (
                f"cannot do {result.missing_parameters} of {len(self.judge.wanted)} parameters: a time for less work"
            )
        _, chosen, kept = best

        def measure() -> list[float]:
            with quiet():
                return [self.clock.timed(partial(chosen, batch, kept)) for batch in self.batches]

        self.sides[name] = measure

    def attempt(self, setting: Setting) -> tuple[Add, Sums, dict[str, Any], float]:
        """The way, its sums, how right it is, and its seconds for a batch."""
        with quiet():
            add = setting.make(copy.deepcopy(self.model))
            few: Sums = {}
            add(self.judge.batch, few)
            judgement = self.judge.judge(errors(few, self.judge.wanted))
            sums: Sums = {}
            add(self.batches[0], sums)
            seconds = min(self.clock.timed(lambda: add(self.batches[0], sums)) for _ in range(2))
        return add, sums, judgement, seconds

    def measure(self, number: int) -> None:
        """Every way once, each after the plain pass."""
        for name, side in self.sides.items():
            beside = [self.clock.timed(partial(plain, self.model, batch)) for batch in self.batches]
            self.model.zero_grad(set_to_none=True)
            seconds = side()
            result = self.results[name]
            result.seconds.append(statistics.median(seconds))
            result.ratios.append(statistics.median(seconds) / statistics.median(beside))
            self.results["plain"].seconds.append(statistics.median(beside))
            say(f"repeat {number + 1}: {name}: {result.seconds[-1]:.4f} s, {result.ratios[-1]:.2f} × plain")

    def summarise(self) -> None:
        for name, result in self.results.items():
            if result.seconds:
                result.seconds_per_batch = statistics.median(result.seconds)
                result.examples_per_second = self.size.batch / result.seconds_per_batch
                result.ratio_to_plain = 1.0 if name == "plain" else statistics.median(result.ratios)

    def bars(self) -> list[Bar]:
        """Nothing is asked of gradmerge's peers."""
        ours = self.results.get("ours")
        if ours is None or ours.ratio_to_plain is None:
            return []
        where = (self.device.type, self.name)
        bars = [Bar.at_most("parameters that are wrong", float(ours.wrong_parameters or 0), 0.0)]
        if where in SLOWER:
            bars.append(Bar.at_most("time over the plain pass", ours.ratio_to_plain, SLOWER[where]))
        factors = self.results.get("kronecker")
        if factors is not None and factors.ratio_to_plain is not None:
            bars.append(Bar.at_most("Kronecker factors that are wrong", float(factors.wrong_parameters or 0), 0.0))
            if where in KRONECKER_SLOWER:
                what = "time of Kronecker factors over the plain pass"
                bars.append(Bar.at_most(what, factors.ratio_to_plain, KRONECKER_SLOWER[where]))
        others = {
            name: result.ratio_to_plain / ours.ratio_to_plain
            for name, result in self.results.items()
            if name not in ("plain", "ours", "kronecker")
            and result.ratio_to_plain is not None
            and result.wrong_parameters == 0
        }
        if self.device.type == "cpu" and others:
            name = min(others, key=others.__getitem__)
            bars.append(
                Bar.at_least(f"time of {name}, the fastest of the others that is right, over ours", others[name], 1.0)
            )
        if where in LOOP_OVER_OURS and "loop" in others:
            bars.append(Bar.at_least("time of the loop over ours", others["loop"], LOOP_OVER_OURS[where]))
        if self.memory:
            allowed = self.memory["plain_peak_bytes"] + self.memory["float32_parameter_bytes"]
            value = self.memory["ours_peak_bytes"] / allowed
            bars.append(Bar.at_most("peak memory over (plain pass + a float32 copy of the parameters)", value, MEMORY))
        return bars

    def report(self) -> dict[str, Any]:
        return {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(self.device),
            "versions": versions(),
            "settings": {
                "model": self.name,
                "device": self.device.type,
                "dtype": str(next(self.model.parameters()).dtype).removeprefix("torch."),
                "layers": self.size.layers,
                "batch_size": self.size.batch,
                "tokens": self.size.tokens,
                "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
                "repeats": self.repeats,
                "examples_compared": self.check_examples,
                "reference": "the loop over examples in float32",
                "wrong_from": WRONG,
            },
            "methods": {name: asdict(result) for name, result in self.results.items()},
            "memory": self.memory or None,
            "bars": [asdict(bar) for bar in self.bars()],
        }


# What comes out.


def machine(device: torch.device) -> dict[str, Any]:
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpu": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version(), "gradmerge": gm.__version__}
    for name in ("torch", "transformers", "triton", "opacus", "backpack-for-pytorch"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def table(report: dict[str, Any]) -> str:
    lines = [("way", "s per batch", "× plain", "examples/s", "largest error", "wrong", "setting, note")]
    for name, result in report["methods"].items():
        judged = result["wrong_parameters"] is not None
        lines.append(
            (
                name,
                number(result["seconds_per_batch"], ".4f"),
                number(result["ratio_to_plain"], ".2f"),
                number(result["examples_per_second"], ".1f"),
                number(result["error"], ".1e"),
                f"{result['wrong_parameters']} ({result['missing_parameters']} missing)" if judged else "",
                "; ".join(words for words in (result["setting"], result["note"]) if words),
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if 0 < column < 6 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def text(report: dict[str, Any]) -> str:
    settings, found = report["settings"], report["machine"]
    lines = [
        f"{settings['model']}, {settings['parameters'] / 1e6:.1f} M parameters in {settings['dtype']}, batches of "
        f"{settings['batch_size']} × {settings['tokens']} tokens, on {found['gpu'] or found['cpu']}",
        table(report),
    ]
    for name, result in report["methods"].items():
        lines += [f"{name}, {tried['setting']}: {outcome(tried)}" for tried in result["tried"]]
    if report["memory"]:
        sizes = {key: f"{value / 2**30:.2f} GiB" for key, value in report["memory"].items()}
        lines.append(", ".join(f"{key.removesuffix('_bytes').replace('_', ' ')} {size}" for key, size in sizes.items()))
    for bar in report["bars"]:
        holds = "holds" if bar["holds"] else "DOES NOT HOLD"
        lines.append(f"{bar['what']}: {bar['value']:.3g}, bar {bar['sense']} {bar['limit']:g}: {holds}")
    return "\n".join(lines)


def outcome(tried: dict[str, Any]) -> str:
    if "failed" in tried:
        return f"fails: {tried['failed']}"
    wrong = f", wrong: {', '.join(tried['wrong_names'])}" if tried["wrong_names"] else ""
    return f"{tried['seconds']:.4f} s, {tried['wrong_parameters']} parameters wrong{wrong}"


def number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def in_short(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:300]}{'…' if len(words) > 300 else ''}"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """What a logger warns of."""
    notes: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            notes.append(" ".join(record.getMessage().split()))

    handler = Keep(logging.WARNING)
    logging.getLogger(name).addHandler(handler)
    try:
        yield notes
    finally:
        logging.getLogger(name).removeHandler(handler)


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed, memory and exactness of measuring curvature.")
    parser.add_argument("--model", choices=SIZES, default="minilm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--batch-size", type=int, help="examples in a batch")
    parser.add_argument("--tokens", type=int, help="tokens in an example")
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check-examples", type=int, default=4, help="examples that are compared with the loop")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"comma-separated, of {', '.join(METHODS)}")
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()
    methods = options.methods.split(",")
    unknown = [method for method in methods if method not in METHODS]
    if unknown or options.repeats < 1:
        parser.error(f"unknown method {unknown[0]!r}" if unknown else "--repeats is at least 1")
    usual = SIZES[options.model]
    batch = 64 if (options.model, options.device) == ("minilm", "cuda") else usual.batch
    size = Size(
        options.layers or usual.layers, options.batch_size or batch, options.tokens or usual.tokens, usual.vocabulary
    )
    dtype = getattr(torch, options.dtype or ("bfloat16" if options.device == "cuda" else "float32"))
    benchmark = Benchmark(options.model, size, torch.device(options.device), dtype, options)
    benchmark.run(methods)
    report = benchmark.report()
    if options.json:
        options.json.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    print(text(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
