"""Tasks on text: rows as batches of tokens, for classification, language models and encoder-decoders."""

from __future__ import annotations

import contextlib
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..curvature.losses import LOSSES, MASKED, ExampleLoss, loss_of
from ..errors import InputError, library_errors
from ..text import first_line, size
from .columns import Fields, read_labels
from .data import MAX_LINE, Rows

#: The longest sequence in tokens if the user gives no --max-length and the model allows more.
DEFAULT_LENGTH = 1024
#: Models that read their answer at the end of the padded row.
PADDED_LEFT = {"xlnet"}
#: Limits on rendering one conversation with a chat template, which takes a millisecond unless the template is hostile.
TEMPLATE_SECONDS, TEMPLATE_MEMORY = 20.0, 4_000_000_000


@dataclass(frozen=True)
class Prompt:
    """The input of a generated answer, and the answer in the data."""

    text: str
    ids: list[int]
    reference: str | None
    """None if the data has no answer, as for plain text."""


class TokenizedData:
    """Rows of text, tokenized up to the longest sequence that goes into the model."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        self.rows, self.fields, self.tokenizer = rows, fields, tokenizer
        self.max_length = longest_sequence(model, tokenizer, max_length)
        embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
        self.vocabulary_size = int(embedding.weight.shape[0])
        self.truncated: set[int] = set()
        """Rows so far that are longer than ``max_length``."""
        config: Any = model.config
        # Padding never counts, but some models use it to count positions, or to find the last token.
        candidates = (config.get_text_config().pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
        tokens = [n for n in candidates if isinstance(n, int) and 0 <= n < self.vocabulary_size]
        if not tokens:
            raise InputError("the model has no tokens: its embedding is empty")
        self.pad_token: int = tokens[0]

    def tokenize(self, index: int, *texts: str, **options: Any) -> dict[str, list[int]]:
        """Tokenize a row's text or pair of texts, of any length."""
        try:
            encoding = {name: list(values) for name, values in self.tokenizer(*texts, **options).items()}
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic in Rust is not an Exception
            raise self.rows.error(index, f"the tokenizer fails on its text: {first_line(error)}") from error
        self.check(index, encoding["input_ids"])
        return encoding

    def encode(self, index: int, *texts: str, **options: Any) -> dict[str, list[int]]:
        """Tokenize a row's text or pair of texts. The tokenizer truncates it to ``max_length``."""
        encoding = self.tokenize(index, *texts, **options)
        if len(encoding["input_ids"]) > self.max_length:
            self.truncated.add(index)
            encoding = self.tokenize(index, *texts, truncation=True, max_length=self.max_length, **options)
        return encoding

    def check(self, index: int, ids: Sequence[int]) -> None:
        """Raise if the model's vocabulary does not have a token."""
        if ids and max(ids) >= self.vocabulary_size:
            raise self.rows.error(
                index,
                f"the tokenizer gives token {max(ids)}, but the model has {self.vocabulary_size} tokens. The tokenizer "
                "is of another model. Give the right one: model_args tokenizer=PATH",
            )

    def collate(self, ids: Sequence[Sequence[int]], labels: Sequence[Sequence[int]]) -> dict[str, Tensor]:
        """Make a batch of examples, padded on the right. Padding does not count in the loss."""
        return {
            "input_ids": pad(ids, self.pad_token),
            "attention_mask": pad([[1] * len(sequence) for sequence in ids], 0),
            "labels": pad(labels, MASKED),
        }

    def notes(self) -> list[str]:
        if not self.truncated:
            return self.rows.notes
        return [
            *self.rows.notes,
            f"{len(self.truncated)} of {len(self.rows)} rows are longer than {self.max_length} tokens and were cut "
            "(max_length)",
        ]


def pad(sequences: Sequence[Sequence[int]], value: int, side: str = "right") -> Tensor:
    """Stack sequences as rows of a tensor, padded to the longest, and to one entry if all are empty."""
    tensors = [torch.tensor(sequence, dtype=torch.long) for sequence in sequences]
    table = pad_sequence(tensors, batch_first=True, padding_value=value, padding_side=side)
    return table if table.numel() else table.new_full((len(tensors), 1), value)


def longest_sequence(model: nn.Module, tokenizer: Any, max_length: int | None) -> int:
    """Return the longest sequence in tokens: ``max_length``, or what model and tokenizer allow up to a default."""
    positions = num_positions(model)
    if max_length is not None:
        if max_length < 2:
            raise InputError(f"max_length={max_length}: at least 2 tokens are needed")
        if positions is not None and max_length > positions:
            raise InputError(f"max_length={max_length}: the model has positions for {positions} tokens only")
        return max_length
    length = getattr(tokenizer, "model_max_length", None)
    if not isinstance(length, int | float) or not length >= 2:
        length = DEFAULT_LENGTH
    return int(min(DEFAULT_LENGTH, positions or DEFAULT_LENGTH, length))


def num_positions(model: nn.Module) -> int | None:
    """Return the number of tokens that the model has positions for; None if positions are relative."""
    for name, module in model.named_modules():
        # RoBERTa and its relatives count positions from the one after padding.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            return module.num_embeddings - module.padding_idx - 1
    config: Any = model.config
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "relative_attention_num_buckets", None):
        return None
    positions = getattr(config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else None


class ClassificationData(TokenizedData):
    """A text or a pair of texts, with labels if the fields name a column for them."""

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        super().__init__(rows, fields, model, tokenizer, max_length)
        config: Any = model.config
        self.labels = None
        if "label" in fields:
            self.labels = read_labels(rows, fields["label"][0], config)
            self.loss: ExampleLoss = loss_of(model, self.labels)
        self.padding_side = "left" if config.model_type in PADDED_LEFT else "right"
        if config.get_text_config().pad_token_id is None:
            # Decoders classify at the last token that is not padding, so they must know the padding token.
            config.get_text_config().pad_token_id = self.pad_token

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        roles = [role for role in ("text", "text2") if role in self.fields]
        encodings = [
            self.encode(n, *(self.rows.text(n, self.fields[role]) for role in roles), return_attention_mask=True)
            for n in indices
        ]
        pad_type = getattr(self.tokenizer, "pad_token_type_id", 0)
        fill = {"input_ids": self.pad_token, "token_type_ids": pad_type if isinstance(pad_type, int) else 0}
        inputs = {
            name: pad([encoding[name] for encoding in encodings], fill.get(name, 0), self.padding_side)
            for name in encodings[0]
        }
        return inputs if self.labels is None else inputs | {"labels": self.labels[list(indices)]}


class CausalLMData(TokenizedData):
    """Texts, prompts with completions, or conversations."""

    loss: ExampleLoss = LOSSES["next-token"]

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        super().__init__(rows, fields, model, tokenizer, max_length)
        template = getattr(tokenizer, "chat_template", None)
        self.marks_assistant = isinstance(template, str) and bool(re.search(r"\{%-?\s*generation\s*-?%\}", template))
        if "messages" in fields and not template:
            raise InputError(
                f"{rows.label}: the tokenizer has no chat template to turn {fields['messages'][0]!r} into "
                "text. Give a tokenizer that has one (model_args tokenizer=PATH), or data with text, or with prompt "
                "and completion"
            )
        if "messages" in fields and not self.marks_assistant:
            rows.notes.append(
                "the chat template does not mark what the assistant says, so every token of a conversation counts"
            )

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        ids, labels = zip(*(self._example(index) for index in indices), strict=True)
        return self.collate(ids, labels)

    def _example(self, index: int) -> tuple[list[int], list[int]]:
        """Return the tokens of a row, and the label of each."""
        if "messages" in self.fields:
            return self._conversation(index)
        if "prompt" in self.fields:
            return self._completion(index)
        ids = self.encode(index, self.rows.text(index, self.fields["text"]))["input_ids"]
        return ids, ids

    def _completion(self, index: int) -> tuple[list[int], list[int]]:
        eos = self.tokenizer.eos_token_id
        prompt = self._tokenize_prompt(index, self.rows.text(index, self.fields["prompt"]))
        text = self.rows.text(index, self.fields["completion"])
        completion = self.tokenize(index, text, add_special_tokens=False)["input_ids"]
        if eos is not None:
            completion.append(eos)
        if len(prompt) + len(completion) > self.max_length:
            # Cut the beginning of the prompt first: only the completion counts.
            self.truncated.add(index)
            completion = completion[: self.max_length - 1]
            prompt = self._cut_beginning(prompt, self.max_length - len(completion))
        return prompt + completion, [MASKED] * len(prompt) + completion

    def _conversation(self, index: int) -> tuple[list[int], list[int]]:
        messages = self.rows.cell(index, self.fields["messages"][0])
        _, encoding = self._apply_template(index, messages, return_assistant_tokens_mask=self.marks_assistant)
        ids = list(encoding["input_ids"])
        counts = list(encoding["assistant_masks"]) if self.marks_assistant else [1] * len(ids)
        if len(ids) > self.max_length:
            self.truncated.add(index)
        ids, counts = ids[: self.max_length], counts[: self.max_length]
        return ids, [token if count else MASKED for token, count in zip(ids, counts, strict=True)]

    def prompt(self, index: int, max_length: int | None = None) -> Prompt:
        """Return a row's prompt: a text, or all messages of a conversation up to the last answer.

        The beginning of a prompt that is too long is cut.
        """
        if "messages" in self.fields:
            messages = self.rows.cell(index, self.fields["messages"][0])
            last = messages[-1] if isinstance(messages, list | tuple) and messages else None
            reference = None
            if isinstance(last, Mapping) and last.get("role") == "assistant":
                messages, reference = messages[:-1], str(last.get("content", ""))
            text, encoding = self._apply_template(index, messages, add_generation_prompt=True)
            ids = list(encoding["input_ids"])
        else:
            text = self.rows.text(index, self.fields.get("prompt", self.fields.get("text", ())))
            ids = self._tokenize_prompt(index, text)
            reference = self.rows.text(index, self.fields["completion"]) if "completion" in self.fields else None
        limit = self.max_length if max_length is None else min(self.max_length, max_length)
        if len(ids) > limit:
            self.truncated.add(index)
            ids = self._cut_beginning(ids, limit)
        return Prompt(text, ids, reference)

    def _tokenize_prompt(self, index: int, text: str) -> list[int]:
        ids = self.tokenize(index, text)["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id:  # added by the tokenizer, but the text goes on
            ids.pop()
        return ids

    def _cut_beginning(self, ids: list[int], length: int) -> list[int]:
        """Return the last tokens, after the special token at the beginning if there is one."""
        start = ids[:1] if ids and ids[0] in self.tokenizer.all_special_ids else []
        return start + ids[len(ids) - length + len(start) :]

    def _apply_template(self, index: int, messages: Any, **options: Any) -> tuple[str, Any]:
        """Render a conversation with the chat template. Return its text and tokens."""
        where = f"{self.rows.name(index)}: the chat template"
        render = self.tokenizer.apply_chat_template
        text_options = {key: value for key, value in options.items() if key == "add_generation_prompt"}
        with library_errors(f"{where} fails"):
            # Text first, within limits: templates are programs, and a tokenizer without memory ends the process.
            with limited(where, TEMPLATE_SECONDS, TEMPLATE_MEMORY):
                text = render(list(messages), tokenize=False, **text_options)
            if len(text) > MAX_LINE:
                raise InputError(f"{where} makes a text longer than the limit of {size(MAX_LINE)}")
            with limited(where, TEMPLATE_SECONDS):
                encoding = render(list(messages), tokenize=True, return_dict=True, **options)
        self.check(index, encoding["input_ids"])
        return text, encoding


class Seq2SeqData(TokenizedData):
    """Sources and targets, cut to the same length."""

    loss: ExampleLoss = LOSSES["tokens"]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        sources, targets = [], []
        for index in indices:
            sources.append(self.encode(index, self.rows.text(index, self.fields["source"]))["input_ids"])
            target = self.rows.text(index, self.fields["target"])
            targets.append(self.encode(index, text_target=target)["input_ids"])
        return self.collate(sources, targets)

    def prompt(self, index: int, max_length: int | None = None) -> Prompt:
        """Return the source of a row as the prompt, and its target as the reference."""
        source = self.rows.text(index, self.fields["source"])
        ids = self.encode(index, source)["input_ids"]
        return Prompt(source, ids, self.rows.text(index, self.fields["target"]))


def drop_empty_rows(rows: Rows, fields: Fields) -> Rows:
    """Drop rows with an empty text, such as the lines between paragraphs."""
    empty = [i for i in range(len(rows)) if "text" in fields and not rows.text(i, fields["text"]).strip()]
    if not empty:
        return rows
    if len(empty) == len(rows):
        raise InputError(f"{rows.label}: every row of {'+'.join(fields['text'])} is empty")
    rows.notes.append(f"{len(empty)} of {len(rows)} rows are empty and were left out")
    return rows.without(empty)


class _Timeout(BaseException):
    """Not an ``Exception``, so that the code that is stopped does not catch it."""


@contextlib.contextmanager
def limited(what: str, seconds: float, nbytes: int | None = None) -> Iterator[None]:
    """Stop Python code that takes too long, or ``nbytes`` more memory than the process has.

    The main thread gets an alarm; other threads check the time at every line. Memory is limited in the main thread on
    Linux.
    """
    start = time.monotonic()

    def stop(*_: Any) -> Any:
        if time.monotonic() > start + seconds:
            raise _Timeout
        return stop

    main, trace = threading.current_thread() is threading.main_thread(), sys.gettrace()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    try:
        if main:
            handler = signal.signal(signal.SIGALRM, stop)
            # Repeat every second: an exception that is raised in a destructor is lost.
            signal.setitimer(signal.ITIMER_REAL, seconds + 0.01, 1)
        else:
            sys.settrace(stop)
        if main and nbytes is not None and statm.exists():
            limit = int(statm.read_text().split()[0]) * resource.getpagesize() + nbytes
            limits = [n for n in (limit, soft, hard) if n != resource.RLIM_INFINITY]
            resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
        yield
    except _Timeout:
        raise InputError(f"{what} takes longer than the limit of {seconds:g} seconds") from None
    except MemoryError:
        if nbytes is None:
            raise
        raise InputError(f"{what} takes more memory than the limit of {size(nbytes)}") from None
    finally:
        if main:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler or signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        else:
            sys.settrace(trace)
