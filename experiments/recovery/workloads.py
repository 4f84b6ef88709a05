"""The three workloads: a causal language model, a text classifier, and an image model with a head for every task."""

from __future__ import annotations

import copy
import gzip
import hashlib
import json
import re
import sysconfig
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

from .settings import Settings

State = dict[str, Tensor]
Rows = dict[str, Tensor]
IGNORED = -100
WEIGHT_DECAY, WARMUP_SHARE, MAX_NORM = 0.01, 0.1, 1.0


class Workload(ABC):
    """A model, its tasks, and their rows on the device."""

    metric: str
    """What shares are computed from: ``loss`` or ``accuracy``."""
    separate_heads = False
    evaluation_batch = 256
    model: Any

    def __init__(self, settings: Settings, seed: int) -> None:
        self.settings, self.seed = settings, seed
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.data: dict[str, dict[str, Rows]] = {}
        """Task → split (train, validation, test) → rows."""

    @abstractmethod
    def losses(self, batch: Rows, task: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return sums of losses per row, numbers of terms per row, and whether each row's answer is right."""

    @property
    def amp(self) -> AbstractContextManager[Any]:
        """Bfloat16 on a GPU."""
        return torch.autocast("cuda", torch.bfloat16) if self.device.type == "cuda" else nullcontext()

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The parameters that are trained and merged."""
        yield from self.model.named_parameters()

    def state(self) -> State:
        """Return a copy of the weights."""
        return {name: p.detach().clone() for name, p in self.parameters()}

    @torch.no_grad()
    def put(self, state: Mapping[str, Tensor]) -> None:
        """Set the weights."""
        for name, parameter in self.parameters():
            parameter.copy_(state[name])

    def state_of(self, module: nn.Module) -> State:
        """Return the merged weights of a module."""
        return {name: module.get_parameter(name).detach() for name, _ in self.parameters()}

    def module(self, state: Mapping[str, Tensor], task: str) -> nn.Module:
        """Return a copy of the model with these weights and the head of a task."""
        self.put(state)
        return copy.deepcopy(self.model).eval()

    def select(self, rows: Rows, index: Tensor) -> Rows:
        """Return some rows, without columns that are padding in all of them."""
        chosen = {name: value[index.to(self.device)] for name, value in rows.items()}
        if "attention_mask" in chosen:
            length = int(chosen["attention_mask"].sum(1).max())
            chosen = {k: v[:, :length] if v.dim() == 2 else v for k, v in chosen.items()}
        return chosen

    def inputs(self, batch: Rows) -> Rows:
        """Return the keyword arguments of the model, without labels that it has to predict."""
        return {name: value for name, value in batch.items() if name != "labels"}

    def random_rows(self, task: str, count: int, sample: int = 0) -> Tensor:
        """Return indices of random training rows of a task; another ``sample`` gives other rows."""
        number = len(self.data[task]["train"]["labels"])
        generator = torch.Generator().manual_seed(self.seed + 1 + 1000 * sample)
        return torch.randperm(number, generator=generator)[:count]

    def unlabeled(self, task: str, batch_size: int, count: int | None = None, sample: int = 0) -> list[Rows]:
        """Return unlabeled rows of a task in batches, by default as many as the settings say."""
        index = self.random_rows(task, self.settings.rows if count is None else count, sample)
        return [self.inputs(self.select(self.data[task]["train"], part)) for part in index.split(batch_size)]

    def labeled(self, task: str, batch_size: int) -> list[Rows]:
        """Return the same rows with labels, for methods that need curvature."""
        batches = self.random_rows(task, self.settings.rows).split(batch_size)
        found = [self.select(self.data[task]["train"], index) for index in batches]
        return [{**self.inputs(batch), "labels": batch["labels"]} for batch in found]

    def train(self, start: State, tasks: Sequence[str], learning_rate: float | None = None) -> State:
        """Fine-tune on the rows of some tasks, shuffled together: AdamW with warm-up and linear decay."""
        settings, lr = self.settings, learning_rate or self.settings.learning_rate
        self.put(start)
        self.model.train()
        numbers = [len(self.data[task]["train"]["labels"]) for task in tasks]
        generator = torch.Generator().manual_seed(self.seed)
        steps = settings.epochs * -(-sum(numbers) // settings.batch_size)
        fused = self.device.type == "cuda"
        parameters = [p for _, p in self.parameters()]
        optimizer = torch.optim.AdamW(parameters, lr, weight_decay=WEIGHT_DECAY, fused=fused)
        warmup = max(1, round(WARMUP_SHARE * steps))
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: min(1, (k + 1) / warmup) * (1 - k / steps))
        task_of = torch.cat([torch.full((n,), t) for t, n in enumerate(numbers)])
        row_of = torch.cat([torch.arange(n) for n in numbers])
        for _ in range(settings.epochs):
            for index in torch.randperm(len(row_of), generator=generator).split(settings.batch_size):
                rows = {task: row_of[index[task_of[index] == t]] for t, task in enumerate(tasks)}
                loss = self.training_loss({task: some for task, some in rows.items() if len(some)})
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                optimizer.step()
                schedule.step()
        self.model.eval()
        return self.state()

    def training_loss(self, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the mean over rows of their mean losses; the tasks share one forward pass."""
        parts = [self.select(self.data[task]["train"], index) for task, index in rows.items()]
        sums, terms, _ = self.losses(_joined(parts), "")
        return (sums / terms.clamp(min=1)).mean()

    def evaluate(
        self, state: Mapping[str, Tensor], split: str = "test", tasks: Sequence[str] = ()
    ) -> dict[str, dict[str, float]]:
        """Return task → loss and accuracy, by default for all tasks."""
        found = {}
        for task, (sums, terms, right) in self.evaluate_rows(state, split, tasks).items():
            found[task] = {"loss": float(sums.sum() / terms.sum()), "accuracy": float(right.mean())}
        return found

    @torch.no_grad()
    def evaluate_rows(
        self, state: Mapping[str, Tensor], split: str = "test", tasks: Sequence[str] = ()
    ) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
        """Return task → what ``losses`` returns for all its rows, in a fixed order."""
        self.put(state)
        self.model.eval()
        found = {}
        for task in tasks or self.data:
            rows = self.data[task][split]
            order = torch.arange(len(rows["labels"]))
            if "attention_mask" in rows:
                order = rows["attention_mask"].sum(1).argsort().cpu()
            batches = [self.losses(self.select(rows, i), task) for i in order.split(self.evaluation_batch)]
            sums, terms, right = (torch.cat(values).double() for values in zip(*batches, strict=True))
            found[task] = (sums, terms, right)
        return found

    def gains(self, state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
        """Return task → how much better ``state`` is than ``other`` on test rows, and the paired standard error."""
        rows, other_rows = self.evaluate_rows(state), self.evaluate_rows(other)
        found = {}
        for task, (sums, terms, right) in rows.items():
            other_sums, _, other_right = other_rows[task]
            if self.metric == "accuracy":
                differences = right - other_right
            else:  # a row counts with its number of tokens
                differences = (other_sums - sums) / terms.mean()
            found[task] = (float(differences.mean()), float(differences.std() / len(differences) ** 0.5))
        return found


def _joined(parts: Sequence[Rows]) -> Rows:
    """Rows of several tasks as one batch; texts are padded to the longest."""
    if len(parts) == 1:
        return parts[0]
    joined = {}
    for name in parts[0]:
        values = [part[name] for part in parts]
        if values[0].dim() == 2:
            length, filler = max(v.shape[1] for v in values), IGNORED if name == "labels" else 0
            values = [F.pad(v, (0, length - v.shape[1]), value=filler) for v in values]
        joined[name] = torch.cat(values)
    return joined


# --- texts


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """Read a gzipped file with an object per line."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def shuffled(values: Sequence[Any]) -> list[Any]:
    """The same order on every run: seeds share their rows."""
    return [values[i] for i in np.random.default_rng(0).permutation(len(values))]


def token_rows(rows: Iterable[tuple[Sequence[int], Any]], pad: int, device: torch.device) -> Rows:
    """Return padded token ids and attention masks; labels are a class, or the first position that counts."""
    every = list(rows)
    length = max(len(ids) for ids, _ in every)
    ids = torch.full((len(every), length), pad)
    mask = torch.zeros(len(every), length, dtype=torch.long)
    for number, (tokens, _) in enumerate(every):
        ids[number, : len(tokens)], mask[number, : len(tokens)] = torch.tensor(tokens), 1
    last = torch.tensor([label for _, label in every])
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device), "labels": last.to(device)}


class Sentiment(Workload):
    """A text classifier; the base is fine-tuned on the first task."""

    metric = "accuracy"

    def __init__(self, settings: Settings, seed: int, model: Path, data: Path) -> None:
        super().__init__(settings, seed)
        torch.manual_seed(seed)
        tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=2, dtype=torch.float32)
        self.model.to(self.device)
        for task in settings.tasks:
            splits = {"train": shuffled(read_jsonl(data / task / "train.jsonl.gz"))}
            splits["test"] = read_jsonl(data / task / "test.jsonl.gz")[: settings.test_rows]
            splits["validation"] = splits["train"][: settings.validation_rows]
            splits["train"] = splits["train"][settings.validation_rows :][: settings.train_rows]
            self.data[task] = {}
            for split, rows in splits.items():
                encode = {"truncation": True, "max_length": settings.length}
                ids = tokenizer([row["text"] for row in rows], **encode)["input_ids"]
                labels = [int(row["label"]) for row in rows]
                self.data[task][split] = token_rows(zip(ids, labels, strict=True), tokenizer.pad_token_id, self.device)

    def losses(self, batch: Rows, task: str) -> tuple[Tensor, Tensor, Tensor]:
        with self.amp:
            logits = self.model(**self.inputs(batch)).logits.float()
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return losses, torch.ones_like(losses), logits.argmax(1) == batch["labels"]


class LanguageModel(Workload):
    """A causal language model. The labels of rows are token ids, ignored in prompts."""

    metric = "loss"
    evaluation_batch = 64

    def __init__(self, settings: Settings, seed: int, model: Path, data: Path) -> None:
        super().__init__(settings, seed)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self.device)
        self.start = self.tokenizer.convert_tokens_to_ids("<|endoftext|>")
        for task in settings.tasks:
            most = {"train": settings.train_rows + settings.validation_rows, "test": settings.test_rows}
            made = {split: getattr(self, f"_{task}")(data, split, count) for split, count in most.items()}
            splits = {"validation": made["train"][: settings.validation_rows]}
            splits |= {"train": made["train"][settings.validation_rows :], "test": made["test"]}
            self.data[task] = {split: self._rows(rows) for split, rows in splits.items()}

    def _rows(self, made: Sequence[tuple[list[int], int]]) -> Rows:
        rows = token_rows(made, self.start, self.device)
        first = rows["labels"][:, None]
        positions = torch.arange(rows["input_ids"].shape[1], device=self.device)[None]
        counts = (positions >= first) & rows["attention_mask"].bool()
        return {**rows, "labels": rows["input_ids"].masked_fill(~counts, IGNORED)}

    def inputs(self, batch: Rows) -> Rows:
        return batch  # labels say which tokens count, and are tokens of the row

    def losses(self, batch: Rows, task: str) -> tuple[Tensor, Tensor, Tensor]:
        labels = batch["labels"][:, 1:]
        counts = labels != IGNORED
        mask = batch["attention_mask"]
        with self.amp:
            hidden = self.model.model(input_ids=batch["input_ids"], attention_mask=mask, use_cache=False)
            logits = self.model.lm_head(hidden.last_hidden_state[:, :-1][counts]).float()
        losses = F.cross_entropy(logits, labels[counts], reduction="none")
        row = counts.nonzero()[:, 0]
        sums = torch.zeros(len(labels), device=self.device).index_add(0, row, losses)
        terms = counts.sum(1)
        return sums, terms, terms > 0

    def _encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def _dialogue(self, data: Path, split: str, count: int) -> list[tuple[list[int], int]]:
        """Responses of Wizard of Wikipedia, given knowledge and the last three turns."""
        rows = []
        for row in shuffled(read_jsonl(data / "wizard_of_wikipedia" / f"{split}.jsonl.gz"))[:count]:
            history = row["history"][-3:]
            turns = [f"{('User', 'Assistant')[(len(history) - 1 - n) % 2]}: {turn}" for n, turn in enumerate(history)]
            prompt = self._encode("\n".join([f"Knowledge: {row['knowledge']}", *turns, "Assistant:"]))
            answer = [*self._encode(" " + row["response"].strip())[: self.settings.length // 2 - 8], self.start]
            prompt = prompt[-(self.settings.length - 1 - len(answer)) :]
            rows.append(([self.start, *prompt, *answer], 1 + len(prompt)))
        return rows

    def _reviews(self, data: Path, split: str, count: int) -> list[tuple[list[int], int]]:
        """Long reviews of IMDb."""
        rows = []
        for row in shuffled(read_jsonl(data / "imdb" / f"{split}.jsonl.gz"))[: 3 * count]:
            ids = self._encode(row["text"])
            if len(ids) >= 96:
                rows.append(([self.start, *ids][: self.settings.length], 1))
        return rows[:count]

    def _sentiment(self, data: Path, split: str, count: int) -> list[tuple[list[int], int]]:
        """The sentiment of Amazon reviews, as one word."""
        rows = []
        for row in shuffled(read_jsonl(data / "amazon" / f"{split}.jsonl.gz"))[: count * (2 if split == "test" else 1)]:
            review = self._encode(row["text"])[: min(150, self.settings.length - 16)]
            prompt = [*self._encode("Review: "), *review, *self._encode("\nSentiment:")]
            answer = self._encode(" positive" if row["label"] else " negative")
            rows.append(([self.start, *prompt, *answer], 1 + len(prompt)))
        return rows

    def _encyclopedia(self, data: Path, split: str, count: int) -> list[tuple[list[int], int]]:
        """Articles of WikiText-2, one after another."""
        with gzip.open(data / "wikitext2" / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
            articles = shuffled(re.split(r"\n(?= = [^=])", file.read()))
        rows: list[tuple[list[int], int]] = []
        tokens: list[int] = []
        for article in articles:
            tokens += [*self._encode(article), self.start]
            while len(tokens) >= self.settings.length - 1 and len(rows) < count:
                rows.append(([self.start, *tokens[: self.settings.length - 1]], 1))
                tokens = tokens[self.settings.length - 1 :]
        return rows

    def _code(self, data: Path, split: str, count: int) -> list[tuple[list[int], int]]:
        """Python's standard library; a fifth of its files are for the test."""
        library = Path(sysconfig.get_paths()["stdlib"])
        other = ("/test", "site-packages", "dist-packages", "/encodings/", "idlelib", "lib2to3", "pydoc_data")
        width, found = self.settings.length - 1, []
        for path in sorted(library.rglob("*.py")):
            name = path.relative_to(library).as_posix()
            tested = int(hashlib.md5(name.encode()).hexdigest(), 16) % 5 == 0
            if any(part in f"/{name}" for part in other) or tested != (split == "test"):
                continue
            ids = self._encode(path.read_text("utf-8", errors="ignore"))
            found += [ids[first : first + width] for first in range(0, len(ids) - width, width)]
        return [([self.start, *ids], 1) for ids in shuffled(found)[:count]]


# --- images

INTERPOLATED: dict[str, Any] = {"interpolate_pos_encoding": True}
"""For images of another size than the model was trained on."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Images(Workload):
    """An image transformer; each task has a linear head, fitted on the base and then fixed."""

    metric = "accuracy"
    separate_heads = True

    def __init__(self, settings: Settings, seed: int, model: Path, data: Path) -> None:
        super().__init__(settings, seed)
        self.model = AutoModelForImageClassification.from_pretrained(model, dtype=torch.float32).to(self.device)
        self.model.eval()
        for task in settings.tasks:
            with np.load(data / f"{task}.npz") as arrays:
                train, test = (self._rows(arrays, part) for part in ("train", "test"))
            order = torch.from_numpy(np.random.default_rng(0).permutation(len(train["labels"])))
            most = {"validation": settings.validation_rows, "train": settings.train_rows}
            splits, used = {"test": {k: v[: settings.test_rows] for k, v in test.items()}}, 0
            for split, count in most.items():
                splits[split] = {k: v[order[used : used + count].to(self.device)] for k, v in train.items()}
                used += count
            self.data[task] = splits
        self.heads = {task: self._fitted_head(task) for task in settings.tasks}

    def _rows(self, arrays: Any, part: str) -> Rows:
        images = torch.from_numpy(arrays[f"x_{part}"])
        images = images[:, None].expand(-1, 3, -1, -1) if images.dim() == 3 else images.permute(0, 3, 1, 2)
        labels = torch.from_numpy(arrays[f"y_{part}"].astype(np.int64))
        return {"pixel_values": images.contiguous().to(self.device), "labels": labels.to(self.device)}

    def inputs(self, batch: Rows) -> Rows:
        """Return enlarged and normalized images."""
        mean, std = (torch.tensor(v, device=self.device).view(1, 3, 1, 1) for v in (MEAN, STD))
        values = F.interpolate(batch["pixel_values"].float() / 255, (self.settings.size,) * 2, mode="bilinear")
        inputs = {"pixel_values": (values - mean) / std}
        return inputs if self.settings.size == self.model.config.image_size else inputs | INTERPOLATED

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if not name.startswith("classifier."))

    def module(self, state: Mapping[str, Tensor], task: str) -> nn.Module:
        self.model.classifier = self.heads[task]
        return super().module(state, task)

    def _features(self, inputs: Rows) -> Tensor:
        """What the heads read."""
        with self.amp:
            found: Tensor = self.model.base_model(**inputs).last_hidden_state[:, 0]
        return found.float()

    def _fitted_head(self, task: str) -> nn.Linear:
        rows = self.data[task]["train"]
        labels = rows["labels"]
        with torch.no_grad():
            pixels = rows["pixel_values"].split(self.evaluation_batch)
            features = torch.cat([self._features(self.inputs({"pixel_values": part})) for part in pixels])
        classes = 1 + max(int(split["labels"].max()) for split in self.data[task].values())
        head = nn.Linear(features.shape[1], classes, device=self.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        steps = self.settings.head_steps
        optimizer = torch.optim.LBFGS(head.parameters(), max_iter=steps, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(head(features), labels) + 5e-4 * head.weight.square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return head.requires_grad_(False)

    def training_loss(self, rows: Mapping[str, Tensor]) -> Tensor:
        parts = {task: self.select(self.data[task]["train"], index) for task, index in rows.items()}
        inputs = [self.inputs(part) for part in parts.values()]
        features = self._features(inputs[0] | {"pixel_values": torch.cat([one["pixel_values"] for one in inputs])})
        pieces = features.split([len(index) for index in rows.values()])
        losses = [
            F.cross_entropy(self.heads[task](piece), part["labels"], reduction="sum")
            for (task, part), piece in zip(parts.items(), pieces, strict=True)
        ]
        return torch.stack(losses).sum() / len(features)

    def losses(self, batch: Rows, task: str) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.heads[task](self._features(self.inputs(batch)))
        losses = F.cross_entropy(logits, batch["labels"], reduction="none")
        return losses, torch.ones_like(losses), logits.argmax(1) == batch["labels"]


WORKLOADS = {"language-model": LanguageModel, "sentiment": Sentiment, "images": Images}
