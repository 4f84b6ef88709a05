"""Estimating curvature: gradmerge against a plain forward and backward pass, and against other exact ways to the sums.

    python -m benchmarks.curvature --model minilm --device cpu --json benchmarks/results/curvature-cpu.json

makes a model with random weights and batches of random tokens, and has every way add up Σ_i [∇ℓ_i]², the squared
gradients of single examples. First each is compared with the loop over examples on a few of them, parameter by
parameter; then all are timed in turn, each next to the plain pass. `kronecker` adds up the Kronecker factors of the
linear layers instead, and is compared with a loop that does the same. Opacus and BackPACK are skipped if they are not
installed:

    pip install --no-deps -c benchmarks/constraints-curvature.txt opacus backpack-for-pytorch
    pip install -c benchmarks/constraints-curvature.txt opt_einsum einops scipy unfoldNd

A peer may have several settings; the first of those that get most parameters right is timed.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradmerge as gm

from .timing import GIB, in_turn, machine, parser_of, say, seconds, text_table, versions, write_report

Batch = dict[str, Tensor]
Sums = dict[str, Tensor]
Add = Callable[[Batch, Sums], None]
"""Adds Σ_i g_i² of a batch's examples to sums by parameter, without the parameters that it does not support."""

#: A sum is wrong from this relative error on, and in 16 bits from twice the loop's own error more.
WRONG = 1e-3
#: Softmax does not see a bias of all keys: its gradient is 0, and what is computed is rounding.
ZERO_GRADIENT = ("key.bias", "k_proj.bias")
#: Batches that are timed in one repeat; the loop gets one.
BATCHES = 3


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
}


@dataclass
class Result:
    """What is known of one way. Seconds are medians of the repeats; the ratio is the median of each repeat's own."""

    seconds_per_batch: float | None = None
    ratio_to_plain: float | None = None
    examples_per_second: float | None = None
    error: float | None = None
    """The largest of all parameters that it supports."""
    wrong_parameters: int | None = None
    """Those it does not support, and those it gets wrong."""
    missing_parameters: int | None = None
    wrong_names: list[str] = field(default_factory=list)
    examples_timed: int | None = None
    """Of a batch, if the time of fewer was scaled up."""
    setting: str = ""
    note: str = ""


def make_model(name: str, layers: int) -> nn.Module:
    """Random weights; no dropout, so that the mode of the model makes no difference."""
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
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
        if sum(holder is module.weight for holder in holders) == 1
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


def backpack_way(model: nn.Module, change: Callable[[Batch], Batch], extension: str) -> Add:
    import backpack
    from backpack import extensions

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


#: Peer → its settings: words, and the way for a copy of the model.
PEERS: dict[str, dict[str, Callable[[nn.Module], Add]]] = {
    "vmap": {
        "as it is": partial(vmap_way, change=same, attention=None, chunk=None),
        "no mask": partial(vmap_way, change=without_mask, attention=None, chunk=None),
        "no mask, eager attention": partial(vmap_way, change=without_mask, attention="eager", chunk=None),
    },
    "opacus": {"positions given for every example": partial(opacus_way, change=with_positions)},
    "backpack": {
        f"{extension} of linear and embedding layers": partial(backpack_way, change=with_positions, extension=extension)
        for extension in ("SumGradSquared", "BatchGrad")
    },
}
METHODS = ("ours", "kronecker", "loop", *PEERS)


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
    """Compares sums over a few examples with those of the loop in float32."""

    def __init__(self, model: nn.Module, batch: Batch, way: Callable[[nn.Module], Add] = loop_way) -> None:
        self.batch = batch
        wide = all(parameter.dtype == torch.float32 for parameter in model.parameters())
        self.wanted: Sums = {}
        way(model if wide else copy.deepcopy(model).float())(batch, self.wanted)
        own: Sums = {}
        if not wide:
            way(model)(batch, own)
        self.loop = errors(own, self.wanted) if own else dict.fromkeys(self.wanted, 0.0)
        model.zero_grad(set_to_none=True)

    def judge(self, sums: Mapping[str, Tensor]) -> dict[str, Any]:
        found = errors(sums, self.wanted)
        wrong = [name for name, error in found.items() if not error <= WRONG + 2 * self.loop[name]]
        able = [error for error in found.values() if math.isfinite(error)]
        return {
            "error": max(able, default=None),
            "wrong_parameters": len(wrong),
            "missing_parameters": len(found) - len(able),
            "wrong_names": wrong[:8],
        }


def ours(model: nn.Module, batches: Sequence[Batch], kind: str, device: str) -> float:
    """Return the median seconds of a batch after the first, which also sets up."""
    stamps: list[float] = []

    def stamped() -> Iterator[Batch]:
        for batch in batches:
            stamps.append(seconds(lambda: None, device) + time.perf_counter())
            yield batch
        stamps.append(seconds(lambda: None, device) + time.perf_counter())

    gm.estimate_curvature(model, stamped(), kind=kind, progress=False)
    return statistics.median(after - before for before, after in itertools.pairwise(stamps[1:]))


def peaks(model: nn.Module, batch: Batch) -> dict[str, int]:
    """Return peaks of CUDA memory, the model's weights included."""

    def peak(action: Callable[[], Any]) -> int:
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        action()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    return {
        "plain_peak_bytes": peak(lambda: plain(model, batch)),
        "ours_peak_bytes": peak(lambda: gm.estimate_curvature(model, [batch, batch], progress=False)),
        "float32_parameter_bytes": sum(4 * parameter.numel() for parameter in model.parameters()),
    }


class Benchmark:
    """One model, its batches, and what every way does with them."""

    def __init__(self, name: str, size: Size, device: str, dtype: torch.dtype, check_examples: int) -> None:
        self.name, self.size, self.device = name, size, device
        self.model = make_model(name, size.layers).to(device, dtype)
        self.batches = make_batches(name, size, BATCHES, torch.device(device))
        self.judge = Judge(self.model, rows(self.batches[0], 0, min(check_examples, size.batch)))
        self.results = {"plain": Result(note="the sum of all losses; a training step, no optimizer")}
        self.sides: dict[str, Callable[[], float]] = {}

    def run(self, methods: Sequence[str], repeats: int) -> None:
        plain(self.model, self.batches[0])
        for method in methods:
            if method in ("ours", "kronecker"):
                self.add_ours(method)
            elif method == "loop":
                self.add_loop()
            else:
                self.add_peer(method)
        beside = {f"plain, beside {name}": self.time_plain for name in self.sides}
        pairs = [pair for name in self.sides for pair in ((f"plain, beside {name}", beside), (name, self.sides))]
        times = in_turn({name: sides[name] for name, sides in pairs}, repeats)  # type: ignore[index]
        self.results["plain"].ratio_to_plain = 1.0
        times["plain"] = [value for name in beside for value in times[name]]
        for name, result in self.results.items():
            if name not in times:
                continue
            result.seconds_per_batch = statistics.median(times[name])
            result.examples_per_second = self.size.batch / result.seconds_per_batch
            if name != "plain":
                both = zip(times[name], times[f"plain, beside {name}"], strict=True)
                result.ratio_to_plain = statistics.median(mine / base for mine, base in both)

    def time_plain(self) -> float:
        found = [seconds(partial(plain, self.model, batch), self.device) for batch in self.batches]
        self.model.zero_grad(set_to_none=True)
        return statistics.median(found)

    def add_ours(self, name: str) -> None:
        kind = "diagonal" if name == "ours" else "kronecker"
        judge = self.judge if name == "ours" else Judge(self.model, self.judge.batch, kronecker_loop_way)
        sums: Any = gm.estimate_curvature(self.model, [judge.batch], kind=kind, progress=False)
        self.results[name] = Result(**judge.judge(dict(sums.items())))
        batches = [self.batches[0], *self.batches]
        self.sides[name] = lambda: ours(self.model, batches, kind, self.device)

    def add_loop(self) -> None:
        # On a GPU, the loop over a batch of a language model takes too long.
        count = 2 if self.device != "cpu" and self.name != "minilm" else self.size.batch
        result = self.results["loop"] = Result(error=max(self.judge.loop.values()), wrong_parameters=0)
        result.missing_parameters, result.examples_timed = 0, count if count < self.size.batch else None
        add, sums, batch = loop_way(self.model), Sums(), rows(self.batches[0], 0, count)
        add(rows(batch, 0, 1), sums)
        self.sides["loop"] = lambda: seconds(lambda: add(batch, sums), self.device) * self.size.batch / count

    def add_peer(self, name: str) -> None:
        result = self.results[name] = Result()
        best: Add | None = None
        for words, make in PEERS[name].items():
            say(f"trying {name}: {words}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    add, few = make(copy.deepcopy(self.model)), Sums()
                    add(self.judge.batch, few)
                except Exception as error:  # a peer may fail in any way; its message is a result
                    result.note = f"{words}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    continue
            judgement = self.judge.judge(few)
            if best is None or judgement["wrong_parameters"] < (result.wrong_parameters or 0):
                best, result = add, Result(**judgement, setting=words)
                self.results[name] = result
        if best is not None:
            way, sums = best, Sums()
            self.sides[name] = lambda: statistics.median(
                seconds(partial(way, batch, sums), self.device) for batch in self.batches
            )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=SIZES, default="minilm")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), help="float32 on CPU, bfloat16 on CUDA")
    parser.add_argument("--batch-size", type=int, help="examples in a batch")
    parser.add_argument("--tokens", type=int, help="tokens in an example")
    parser.add_argument("--layers", type=int, help="layers of the model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--check-examples", type=int, default=4, help="examples that are compared with the loop")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"comma-separated, of {', '.join(METHODS)}")
    options = parser.parse_args()
    methods = options.methods.split(",")
    if unknown := [method for method in methods if method not in METHODS]:
        parser.error(f"unknown method {unknown[0]!r}")
    usual = SIZES[options.model]
    batch = 64 if (options.model, options.device) == ("minilm", "cuda") else usual.batch
    sizes = (options.layers or usual.layers, options.batch_size or batch, options.tokens or usual.tokens)
    size = Size(*sizes, usual.vocabulary)
    dtype = options.dtype or ("bfloat16" if options.device == "cuda" else "float32")
    benchmark = Benchmark(options.model, size, options.device, getattr(torch, dtype), options.check_examples)
    benchmark.run(methods, options.repeats)
    memory = peaks(benchmark.model, benchmark.batches[0]) if options.device == "cuda" else None
    settings = {"model": options.model, "device": options.device, "dtype": dtype, "repeats": options.repeats}
    settings |= {"layers": size.layers, "batch_size": size.batch, "tokens": size.tokens}
    settings["parameters"] = sum(parameter.numel() for parameter in benchmark.model.parameters())
    write_report(
        options.json,
        machine=machine(options.device),
        versions=versions("transformers", "triton", "opacus", "backpack-for-pytorch"),
        settings=settings,
        methods={name: asdict(result) for name, result in benchmark.results.items()},
        memory=memory,
    )
    lines = []
    for name, result in benchmark.results.items():
        values = (result.seconds_per_batch, result.ratio_to_plain, result.error, result.wrong_parameters)
        lines.append(
            [name, *("" if value is None else f"{value:.3g}" for value in values), result.setting or result.note]
        )
    print(text_table(["way", "s per batch", "× plain", "largest error", "wrong", "setting, note"], lines))
    for what, value in (memory or {}).items():
        print(f"{what}: {value / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
