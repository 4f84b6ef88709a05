"""Language modelling: every token of a text from those before it, or every token of a completion from its prompt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..curvature.losses import LOSSES, MASKED, ExampleLoss
from ..errors import InputError
from ..text import first_line, size
from .data.columns import Fields
from .data.read import MAX_LINE, Rows, shorten
from .limits import little_memory, patience
from .tokens import Prompt, Tokens

#: Limits for a chat template to write down one conversation, which takes a millisecond unless it was made not to end.
SECONDS, MEMORY = 20.0, 4_000_000_000


class LanguageExamples(Tokens):
    """Texts, prompts with completions, or conversations."""

    output: ExampleLoss = LOSSES["next-token"]

    def __init__(self, rows: Rows, fields: Fields, model: nn.Module, tokenizer: Any, max_length: int | None) -> None:
        super().__init__(rows, fields, model, tokenizer, max_length)
        template = getattr(tokenizer, "chat_template", None)
        marked = isinstance(template, str) and re.search(r"\{%-?\s*generation\s*-?%\}", template)
        self._all_counts = not marked
        if "messages" in fields and not template:
            raise InputError(
                f"{rows.label}: the tokenizer has no chat template to turn {fields['messages'][0]!r} into "
                "text. Give a tokenizer that has one (model_args tokenizer=PATH), or data with text, or with prompt "
                "and completion"
            )
        if "messages" in fields and not marked:
            unmarked = "the chat template does not mark what the assistant says"
            rows.notes.append(f"{unmarked}, so every token of a conversation counts")

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        ids, labels = zip(*(self._example(index) for index in indices), strict=True)
        return self.batch_of(ids, labels)

    def _example(self, index: int) -> tuple[list[int], list[int]]:
        """Tokens of a row, and the label of each."""
        if "messages" in self.fields:
            ids, labels = self._conversation(index)
        elif "prompt" in self.fields:
            ids, labels = self._completion(index)
        else:
            ids = self.encode(index, self.rows.text(index, self.fields["text"]))["input_ids"]
            labels = list(ids)
        self.check(index, ids)
        return ids, labels

    def prompt(self, index: int, room: int | None = None) -> Prompt:
        """What comes before the answer of a row: its prompt, or all of a conversation but the last message, or a text.

        Of more tokens than there is ``room`` for, and than ``max_length`` allows, the first are left out.
        """
        if "messages" in self.fields:
            said = self.rows.cell(index, self.fields["messages"][0])
            last = said[-1] if isinstance(said, list | tuple) and said else None
            answered = isinstance(last, Mapping) and last.get("role") == "assistant"
            asked, encoded = self._rendered(index, said[:-1] if answered else said, add_generation_prompt=True)
            ids, answer = list(encoded["input_ids"]), str(last.get("content", "")) if answered and last else None
        else:
            asked = self.rows.text(index, self.fields.get("prompt", self.fields.get("text", ())))
            ids = self._open_ended(index, asked)
            answer = self.rows.text(index, self.fields["completion"]) if "completion" in self.fields else None
        self.check(index, ids)
        most = min(self.max_length, self.max_length if room is None else room)
        if len(ids) > most:
            self.truncated.add(index)
            ids = self._last(ids, most)
        return Prompt(asked, ids, answer)

    def _open_ended(self, index: int, text: str) -> list[int]:
        ids = self.all_of(index, text)["input_ids"]
        if ids and ids[-1] == self.tokenizer.eos_token_id:  # put there by the tokenizer, but the text goes on
            ids.pop()
        return ids

    def _last(self, ids: list[int], room: int) -> list[int]:
        """The last tokens, after a special one that all began with."""
        start = ids[:1] if ids and ids[0] in self.tokenizer.all_special_ids else []
        return start + ids[len(ids) - room + len(start) :]

    def _completion(self, index: int) -> tuple[list[int], list[int]]:
        eos = self.tokenizer.eos_token_id
        prompt = self._open_ended(index, self.rows.text(index, self.fields["prompt"]))
        answer = self.rows.text(index, self.fields["completion"])
        completion = self.all_of(index, answer, add_special_tokens=False)["input_ids"]
        if eos is not None:
            completion.append(eos)
        if len(prompt) + len(completion) > self.max_length:
            # The beginning of the prompt goes first: without a completion no token counts.
            self.truncated.add(index)
            completion = completion[: self.max_length - 1]
            prompt = self._last(prompt, self.max_length - len(completion))
        return prompt + completion, [MASKED] * len(prompt) + completion

    def _conversation(self, index: int) -> tuple[list[int], list[int]]:
        messages = self.rows.cell(index, self.fields["messages"][0])
        _, encoded = self._rendered(index, messages, return_assistant_tokens_mask=not self._all_counts)
        ids = list(encoded["input_ids"])
        counts = [1] * len(ids) if self._all_counts else list(encoded["assistant_masks"])
        if len(ids) > self.max_length:
            self.truncated.add(index)
        ids, counts = ids[: self.max_length], counts[: self.max_length]
        return ids, [token if count else MASKED for token, count in zip(ids, counts, strict=True)]

    def _rendered(self, index: int, messages: Any, **options: Any) -> tuple[str, Any]:
        """A conversation as the chat template writes it down, and its tokens."""
        where = f"{self.rows.label}: row {self.rows.number(index)}"
        apply = self.tokenizer.apply_chat_template
        ask = {"add_generation_prompt": True} if "add_generation_prompt" in options else {}
        try:
            # Text first, within limits: templates are programs. (A tokenizer that runs out of memory ends the process.)
            with patience(SECONDS, f"{where}: the chat template"), little_memory(MEMORY, f"{where}: the chat template"):
                text = apply(list(messages), tokenize=False, **ask)
            if len(text) > MAX_LINE:
                raise InputError(f"{where}: the chat template makes a text longer than {size(MAX_LINE)}, the limit")
            with patience(SECONDS, f"{where}: the chat template"):
                return text, apply(list(messages), tokenize=True, return_dict=True, **options)
        except InputError:
            raise
        except Exception as error:  # templates may raise anything
            refused = f"{shorten(messages)} is no conversation that the chat template takes"
            raise InputError(f"{where}: {refused}: {first_line(error)}") from error


def without_empty(rows: Rows, fields: Fields) -> tuple[Rows, list[str]]:
    """The rows whose text is not empty, as texts have empty lines between paragraphs; and a note of it."""
    if "text" not in fields:
        return rows, []
    empty = [index for index in range(len(rows)) if not rows.text(index, fields["text"]).strip()]
    if not empty:
        return rows, []
    if len(empty) == len(rows):
        raise InputError(f"{rows.label}: every row of {'+'.join(fields['text'])} is empty")
    return rows.without(empty), [f"{len(empty)} of {len(rows)} rows are empty and were left out"]
