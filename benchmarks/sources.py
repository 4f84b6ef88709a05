"""Where curvature comes from in training, and what a prior in training does to merges.

    python -m benchmarks.sources --encoder MODEL --data DIR --json benchmarks/results/sources.json --jobs 6
    python -m benchmarks.sources --show benchmarks/results/sources.json

fine-tunes an encoder on one sentiment data set, the base, and from there on others with the Trainer: without a prior,
once with gradients clipped and once not, and under several priors and strengths. ``DIR/NAME/{train,test}.jsonl.gz``
hold rows with ``text`` and ``label``. Curvature from Adam's state and from batches of training is compared, at the same
weights, with the exact pass over all training data; every setting's models are merged and evaluated. A setting that is
finished is not run again, so a run that was stopped goes on. ``--show`` prints the results as Markdown.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import platform
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from copy import copy
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

import gradmerge as gm
from gradmerge.tasks.data.read import read_rows

from .precision import TASKS

LEARNING_RATE = 5e-5
BATCH = 32
WARMUP = 0.1


@dataclass(frozen=True)
class Setting:
    """How the models of one merge are fine-tuned, the same for all of them."""

    prior: str = "none"
    """none, fisher (the base's curvature, a mean over examples) or identity."""
    strength: float = 0.0
    coupling: str = "decoupled"
    clip: float = 1.0
    """The norm that gradients are clipped to; 0 does not clip."""
    sources: bool = False
    """Whether curvature from training is kept as well, and compared with the exact pass."""

    @property
    def name(self) -> str:
        kept = "-sources" if self.sources else ""
        return f"{self.prior}-{self.coupling}-{self.strength:g}-clip{self.clip:g}{kept}"


@dataclass(frozen=True)
class Job:
    """What a process has to know to do its part."""

    work: Path
    """Of one seed."""
    tokens: Path
    encoder: str
    names: tuple[str, ...]
    device: str
    epochs: float
    seed: int
    every: int
    threads: int
    pad: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    if args.show:
        print(markdown(json.loads(args.show.read_text())))
        return
    if not args.encoder or not args.data:
        parser.error("--encoder and --data are needed")
    begun = time.perf_counter()
    names = tuple(args.tasks.split(","))
    work = args.work / fingerprint(args, names)
    tokens, pad = tokenize_all(args, names, work / "tokens")
    threads = max(1, (os.cpu_count() or 1) // args.jobs)
    jobs = [
        Job(
            work / f"seed-{seed}", tokens, args.encoder, names, args.device, args.epochs, seed, args.every, threads, pad
        )
        for seed in args.seeds
    ]
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        bases = finish(pool, [functools.partial(make_base, job) for job in jobs])
        settings = settings_of(args)
        found = finish(pool, [functools.partial(run_setting, job, s) for s in settings for job in jobs])
    result = {
        "command": "python -m benchmarks.sources",
        "note": "of every set, as many rows as were at hand up to the limit; accuracies are shares of the test set",
        "machine": {
            "device": torch.cuda.get_device_name() if args.device == "cuda" else platform.processor() or "cpu",
            "cores": os.cpu_count(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "settings": {
            "encoder": Path(args.encoder).name,
            "tasks": names,
            "epochs": args.epochs,
            "limit": args.limit,
            "max_length": args.max_length,
            "batch": BATCH,
            "learning_rate": LEARNING_RATE,
            "online_every": args.every,
            "seeds": args.seeds,
            "jobs": args.jobs,
            "training_examples": {name: len(load_tokens(tokens, name, "train")[1]) for name in names},
        },
        "base": bases,
        "rows": found,
        "seconds": time.perf_counter() - begun,
    }
    print(markdown(result))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    def numbers(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(part) for part in text.split(",") if part]

    parser.add_argument("--show", type=Path, metavar="JSON", help="print results that are there, and do nothing else")
    parser.add_argument("--encoder", help="pre-trained encoder: folder or Hub id")
    parser.add_argument("--data", type=Path, help="folder with NAME/train.jsonl.gz and NAME/test.jsonl.gz")
    parser.add_argument("--tasks", default=",".join(TASKS), help="names; the first is the base's")
    parser.add_argument("--work", type=Path, default=Path("bench-data/sources"), help="where bases and results go")
    parser.add_argument("--limit", type=int, help="rows of each set at most, to try it")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--max-length", type=int, default=128)
    parser.add_argument("--every", type=int, default=10, help="steps between two batches of the online estimate")
    parser.add_argument("--strengths", type=numbers(float), default=[1.0, 1e2, 1e4, 1e6, 1e8], help="of the Fisher")
    parser.add_argument("--identity-strengths", type=numbers(float), default=[1e1, 1e2, 1e3])
    parser.add_argument("--couplings", type=numbers(str), default=["decoupled", "adam"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes that fine-tune at the same time")
    parser.add_argument("--seeds", type=numbers(int), default=[0])
    parser.add_argument("--json", type=Path)


def settings_of(args: argparse.Namespace) -> list[Setting]:
    fisher = [Setting("fisher", s, coupling) for s in args.strengths for coupling in args.couplings]
    identity = [Setting("identity", s) for s in args.identity_strengths]
    return [Setting(clip=0.0, sources=True), Setting(clip=1.0, sources=True), *fisher, *identity]


def fingerprint(args: argparse.Namespace, names: Sequence[str]) -> str:
    """Results of other settings, which must not be mixed with these, lie in another folder."""
    facts = [Path(args.encoder).name, names, args.limit, args.epochs, args.max_length, args.every, BATCH, LEARNING_RATE]
    return hashlib.sha256(json.dumps([*facts, args.device]).encode()).hexdigest()[:12]


def finish(pool: ProcessPoolExecutor, calls: Sequence[Callable[[], dict[str, Any]]]) -> list[dict[str, Any]]:
    """What the calls give, in their order; each is told of when it is done."""
    begun = time.perf_counter()
    futures = {pool.submit(call): place for place, call in enumerate(calls)}
    for count, future in enumerate(as_completed(futures), 1):
        row = future.result()
        print(
            f"[{count}/{len(calls)}] {row['name']}, seed {row['seed']}: {time.perf_counter() - begun:.0f} s", flush=True
        )
    return [future.result() for future in futures]


# Data: tokenized once, padded to the longest of a batch.


def tokenize_all(args: argparse.Namespace, names: Sequence[str], out: Path) -> tuple[Path, int]:
    tokenizer = AutoTokenizer.from_pretrained(args.encoder)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        for split in ("train", "test"):
            if not (out / f"{name}-{split}.pt").is_file():
                rows = read_rows(str(args.data / name / f"{split}.jsonl.gz"), limit=args.limit)
                texts = tokenizer(list(rows.column("text")), truncation=True, max_length=args.max_length)["input_ids"]
                whole = [torch.tensor(text, dtype=torch.int32) for text in texts], list(rows.column("label"))
                torch.save(whole, out / "partial.pt")
                (out / "partial.pt").replace(out / f"{name}-{split}.pt")
    return out, tokenizer.pad_token_id


@functools.cache
def load_tokens(folder: Path, name: str, split: str) -> tuple[list[Tensor], list[int]]:
    texts, labels = torch.load(folder / f"{name}-{split}.pt", weights_only=True)
    return texts, labels


class Examples(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, texts: Sequence[Tensor], labels: Sequence[int]) -> None:
        self.texts, self.labels = texts, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> dict[str, Any]:
        return {"input_ids": self.texts[place], "labels": self.labels[place]}


def collate(pad: int, items: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    ids = nn.utils.rnn.pad_sequence([item["input_ids"].long() for item in items], batch_first=True, padding_value=pad)
    lengths = torch.tensor([len(item["input_ids"]) for item in items])
    mask = torch.arange(ids.shape[1]) < lengths[:, None]
    return {
        "input_ids": ids,
        "attention_mask": mask.long(),
        "labels": torch.tensor([item["labels"] for item in items]),
    }


def batches_by_length(job: Job, name: str, split: str, size: int) -> Iterable[dict[str, Tensor]]:
    """All examples, those of like length together: less padding, and the same sums and counts."""
    data = Examples(*load_tokens(job.tokens, name, split))
    order = sorted(range(len(data)), key=lambda i: len(data.texts[i]))
    for first in range(0, len(order), size):
        batch = collate(job.pad, [data[i] for i in order[first : first + size]])
        yield {key: value.to(job.device) for key, value in batch.items()}


# Stages. Each leaves its result in a file, and returns it the next time.


def kept(path: Path, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    if not path.is_file():
        result = make()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_text(json.dumps(result))
        path.with_suffix(".partial").replace(path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def prepare_process(job: Job) -> None:
    torch.set_num_threads(job.threads)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


def make_base(job: Job) -> dict[str, Any]:
    """The encoder, fine-tuned on the first task, with its curvature."""

    def make() -> dict[str, Any]:
        prepare_process(job)
        begun = time.perf_counter()
        torch.manual_seed(job.seed)
        model = AutoModelForSequenceClassification.from_pretrained(job.encoder, num_labels=2, dtype=torch.float32)
        train(job, model, job.names[0], job.work / "training-base", Setting())
        trained = time.perf_counter()
        model.save_pretrained(job.work / "base")
        measure(job, model, job.names[0]).save(job.work / "base-curvature", force=True)
        return {
            "name": "base",
            "seed": job.seed,
            "accuracy": evaluate(job, model, job.names),
            "seconds": {"training": trained - begun, "rest": time.perf_counter() - trained},
        }

    return kept(job.work / "base.json", make)


def run_setting(job: Job, setting: Setting) -> dict[str, Any]:
    """Fine-tune the base on every other task in one way, merge, and evaluate."""
    return kept(job.work / f"{setting.name}.json", functools.partial(_run_setting, job, setting))


def _run_setting(job: Job, setting: Setting) -> dict[str, Any]:
    prepare_process(job)
    begun = time.perf_counter()
    base, prior = load_base(job), gm.Curvature.load(job.work / "base-curvature")
    start = state_of(base)
    tuned: list[dict[str, Tensor]] = []
    curvature: dict[str, list[gm.Curvature]] = {}
    rows: dict[str, dict[str, Any]] = {}
    for name in job.names[1:]:
        model = load_base(job)
        folder = job.work / f"training-{setting.name}" / name
        log = train(job, model, name, folder, setting)
        tuned.append(state_of(model))
        sources = {"pass": measure(job, model, name)}
        if setting.sources:
            sources |= {source: gm.Curvature.load(folder / source / "curvature") for source in ("adam", "online")}
        for source, found in sources.items():
            curvature.setdefault(source, []).append(found)
        rows[name] = {
            "accuracy": evaluate(job, model, [name])[name],
            "distance": distance(tuned[-1], start),
            "training_loss": log,
            "against_pass": {source: compare(found, sources["pass"]) for source, found in sources.items()},
        }
        shutil.rmtree(folder)
    merges = {"task-arithmetic": gm.merge_state_dicts(start, tuned, "task-arithmetic")}
    for source, found in curvature.items():
        merges[f"gradient-matching, {source}"] = gm.merge_state_dicts(start, tuned, prior=prior, curvature=found)
    accuracy = {}
    for label, merged in merges.items():
        base.load_state_dict(merged)
        accuracy[label] = evaluate(job, base.to(job.device), job.names)
    return {
        **asdict(setting),
        "name": setting.name,
        "seed": job.seed,
        "tasks": rows,
        "merged": accuracy,
        "seconds": time.perf_counter() - begun,
    }


def train(job: Job, model: nn.Module, name: str, out: Path, setting: Setting) -> float:
    """Fine-tune in place with the Trainer; the mean training loss."""
    arguments = TrainingArguments(
        output_dir=str(out),
        num_train_epochs=job.epochs,
        learning_rate=LEARNING_RATE,
        max_grad_norm=setting.clip,
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="linear",
        warmup_steps=WARMUP,
        weight_decay=0.0,
        seed=job.seed,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        use_cpu=job.device == "cpu",
        optim="adamw_torch",
        dataloader_pin_memory=False,
    )
    given: dict[str, Any] = {
        "args": arguments,
        "train_dataset": Examples(*load_tokens(job.tokens, name, "train")),
        "data_collator": functools.partial(collate, job.pad),
    }
    if setting.sources:
        given["callbacks"] = [
            Elsewhere(gm.CurvatureCallback(source, every=job.every), out / source)  # type: ignore[arg-type]
            for source in ("adam", "online")
        ]
    if setting.prior == "none":
        trainer = Trainer(model, **given)
    else:
        prior = str(job.work / "base-curvature") if setting.prior == "fisher" else "identity"
        trainer = gm.PriorTrainer(model, prior=prior, strength=setting.strength, coupling=setting.coupling, **given)
    trainer.remove_callback(PrinterCallback)
    return float(trainer.train().training_loss)


class Elsewhere(TrainerCallback):
    """A callback that sees another output folder, so that several of one kind do not write to one place."""

    def __init__(self, inner: TrainerCallback, folder: Path) -> None:
        self._inner, self._folder = inner, folder

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)
        event = getattr(self._inner, name)

        def call(args: TrainingArguments, *others: Any, **named: Any) -> Any:
            elsewhere = copy(args)
            elsewhere.output_dir = str(self._folder)
            return event(elsewhere, *others, **named)

        return call


def load_base(job: Job) -> Any:
    torch.manual_seed(job.seed)
    return AutoModelForSequenceClassification.from_pretrained(job.work / "base", dtype=torch.float32)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def measure(job: Job, model: nn.Module, name: str) -> gm.Curvature:
    """The exact pass: the squared gradient of every training example at the final weights."""
    model.to(job.device)
    found = gm.estimate_curvature(model, batches_by_length(job, name, "train", 64))
    return gm.Curvature({n: v.cpu() for n, v in found.items()}, found.examples, found.likelihood, found.model)


@torch.no_grad()
def evaluate(job: Job, model: nn.Module, names: Sequence[str]) -> dict[str, float]:
    model.eval()
    found = {}
    for name in names:
        right = total = 0
        for batch in batches_by_length(job, name, "test", 256):
            labels = batch.pop("labels")
            right = right + (model(**batch).logits.argmax(1) == labels).sum()
            total += len(labels)
        found[name] = float(right) / total
    return found | {"mean": statistics.mean(found.values())}


def distance(tuned: Mapping[str, Tensor], base: Mapping[str, Tensor]) -> float:
    """‖θ_t − θ_0‖ over all entries."""
    return math.sqrt(sum(float((value.double() - base[name].double()).square().sum()) for name, value in tuned.items()))


def compare(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """How near one curvature is to another, over all entries: direction, size of an entry, size of the sum."""
    one = torch.cat([found[name].flatten().double() for name in exact])
    two = torch.cat([value.flatten().double() for value in exact.values()])
    both = (one > 0) & (two > 0)
    ratios = (one[both] / two[both]).log()
    return {
        "cosine": float(one @ two / (one.norm() * two.norm())),
        "median_log_ratio": float(ratios.median()),
        "log_ratio_quartiles": [float(q) for q in ratios[torch.randperm(len(ratios))[:1_000_000]].quantile(QUARTERS)],
        "ratio_of_sums": float(one.sum() / two.sum()),
        "share_of_entries_compared": float(both.double().mean()),
    }


QUARTERS = torch.tensor([0.25, 0.75], dtype=torch.float64)


# What is shown.


def markdown(result: Mapping[str, Any]) -> str:
    settings, rows = result["settings"], result["rows"]
    names = settings["tasks"]
    seeds = len(settings["seeds"])
    runs = "one seed" if seeds == 1 else f"means over {seeds} seeds ± standard deviation"
    limit = f"at most {settings['limit']} rows of each set" if settings["limit"] else "all rows at hand"
    head = (
        f"{settings['encoder']}, base fine-tuned on {names[0]}, then on {', '.join(names[1:])} ({limit}, "
        f"{settings['epochs']:g} epochs, batches of {settings['batch']}, learning rate {settings['learning_rate']:g}, "
        f"{settings['max_length']} tokens at most); {runs}; {result['machine']['device']}."
    )
    kept_sources = [row for row in rows if row["sources"]]
    tables = [closeness_table(kept_sources), scale_table(kept_sources), merge_table(result, kept_sources)]
    return "\n\n".join([head, *tables, prior_table(result)])


def closeness_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Each source beside the exact pass, over tasks and seeds."""
    lines = []
    for clip in sorted({row["clip"] for row in rows}):
        for source in ("adam", "online"):
            found = [t["against_pass"][source] for row in rows if row["clip"] == clip for t in row["tasks"].values()]
            ratios = [math.exp(f["median_log_ratio"]) for f in found]
            sums = [f["ratio_of_sums"] for f in found]
            cosines = [f["cosine"] for f in found]
            lines.append(
                [f"`{source}`", clipped(clip), between(cosines, ".2f"), between(ratios, ".3g"), between(sums, ".3g")]
            )
    head = ["source", "gradients", "cosine with the pass", "median ratio of an entry", "ratio of the sums"]
    return table(head, lines)


def scale_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Sum of each source by that of the pass, task by task: a merge needs the same number for all of them."""
    names = list(rows[0]["tasks"])
    lines = []
    for clip in sorted({row["clip"] for row in rows}):
        some = [row for row in rows if row["clip"] == clip]
        for source in ("adam", "online"):
            by_task = [[row["tasks"][n]["against_pass"][source]["ratio_of_sums"] for row in some] for n in names]
            spread = [max(r) / min(r) for r in zip(*by_task, strict=True)]
            lines.append([f"`{source}`", clipped(clip), *(show(v, ".3g") for v in by_task), show(spread, ".3g")])
    return table(["sum ÷ sum of the pass", "gradients", *names, "largest ÷ smallest"], lines)


def merge_table(result: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    names = [*result["settings"]["tasks"], "mean"]
    lines = [["base", "", *(show([100 * b["accuracy"][n] for b in result["base"]], ".1f") for n in names)]]
    for clip in sorted({row["clip"] for row in rows}):
        some = [row for row in rows if row["clip"] == clip]
        own = [[100 * row["tasks"][n]["accuracy"] for row in some] if n in some[0]["tasks"] else [] for n in names]
        lines.append(["each on its own task", clipped(clip), *(show(v, ".1f") for v in own)])
        for label in some[0]["merged"]:
            values = [[100 * row["merged"][label][n] for row in some] for n in names]
            lines.append([label, clipped(clip), *(show(v, ".1f") for v in values)])
    return table(["accuracy, %", "gradients", *names], lines)


def prior_table(result: Mapping[str, Any]) -> str:
    plain = [replace(Setting(), sources=True).name]
    groups: dict[tuple[str, str], list[str]] = {}
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        by_name.setdefault(row["name"], []).append(row)
        if row["prior"] != "none":
            group = groups.setdefault((row["prior"], row["coupling"]), [])
            group += [row["name"]] if row["name"] not in group else []
    lines = []
    for (prior, coupling), members in [(("none", ""), plain), *groups.items()]:
        for name in members:
            rows = by_name[name]
            own = [100 * statistics.mean(t["accuracy"] for t in row["tasks"].values()) for row in rows]
            moved = [statistics.mean(t["distance"] for t in row["tasks"].values()) for row in rows]
            merged = [
                show([100 * row["merged"][label]["mean"] for row in rows], ".1f")
                for label in ("task-arithmetic", "gradient-matching, pass")
            ]
            strength = f"{rows[0]['strength']:g}" if prior != "none" else "0"
            lines.append([prior, coupling, strength, show(own, ".1f"), show(moved, ".3g"), *merged])
    head = ["prior", "coupling", "strength", "own task, %", "distance from the base"]
    return table([*head, "task arithmetic, %", "gradient matching, %"], lines)


def clipped(clip: float) -> str:
    return f"clipped to norm {clip:g}" if clip else "not clipped"


def show(values: Sequence[float], form: str) -> str:
    """The mean, with the standard deviation over seeds where there are several."""
    if not values:
        return ""
    mean = format(statistics.mean(values), form)
    return mean if len(values) == 1 else f"{mean} ± {format(statistics.stdev(values), form)}"


def between(values: Sequence[float], form: str) -> str:
    """Median, and the smallest and largest, over tasks and seeds."""
    return f"{format(statistics.median(values), form)} ({format(min(values), form)} to {format(max(values), form)})"


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---" if place == 0 else "---:" for place in range(len(head))]
    return "\n".join("| " + " | ".join(line) + " |" for line in (head, rule, *lines))


if __name__ == "__main__":
    main()
