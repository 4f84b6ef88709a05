"""What models write: greedy decoding of rows of the data, in batches.

Of the generation settings beside a model only its special tokens count (where a text begins and ends, what pads it):
no sampling, no beams, no penalties, so that the same weights write the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..curvature.offload import input_device
from ..errors import GradmergeError, InputError
from ..quiet import quiet_transformers
from ..text import first_line
from .loading import LoadedTask
from .tokens import Prompt, Tokens, padded, positions_of

#: Tokens that a model writes at most, where nothing else is said and it has the room.
NEW_TOKENS = 64
#: Settings of generation that are taken from the model.
_KEPT = ("bos_token_id", "eos_token_id", "decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id")

Advance = Callable[[int], None]
"""Called with the number of rows that are done."""


def generate(
    loaded: LoadedTask,
    model: nn.Module,
    rows: Sequence[int],
    max_new_tokens: int | None = None,
    *,
    batch_size: int | None = None,
    advance: Advance | None = None,
) -> list[str]:
    """What a model writes for some rows of the data of a `causal-lm` or `seq2seq` task.

    Args:
        loaded: The data, its tokenizer, and the generation settings whose special tokens count.
        model: The model that writes: that of ``loaded``, or one like it with other weights.
        rows: Rows by number, from 0.
        max_new_tokens: Tokens that are written at most; 64 where nothing is said, or what the model has room for.
        batch_size: Rows at once; the texts do not depend on it.
        advance: Told of rows that are done.

    Returns:
        A text for each row, without special tokens.
    """
    return _Writer(loaded, model, max_new_tokens).write(rows, batch_size or loaded.batch_size, advance)


def prompts(loaded: LoadedTask, rows: Sequence[int], room: int | None = None) -> list[Prompt]:
    """What a model is asked in some rows, with at most ``room`` tokens."""
    data: Any = loaded.data
    if not isinstance(data, Tokens) or not hasattr(data, "prompt"):
        raise InputError(f"a model for {loaded.task} writes no text; causal-lm and seq2seq models do")
    with quiet_transformers():
        return [data.prompt(row, room) for row in rows]


class _Writer:
    """A model with how it writes."""

    def __init__(self, loaded: LoadedTask, model: Any, max_new_tokens: int | None) -> None:
        import transformers

        self._loaded, self._model = loaded, model
        self._from_left = loaded.task != "seq2seq"
        stated = getattr(loaded.model, "generation_config", None)
        positions = positions_of(loaded.model)
        self._new, self._room = _lengths(positions, max_new_tokens, self._from_left)
        data: Any = loaded.data
        kept = {name: getattr(stated, name, None) for name in _KEPT}
        ends = kept["eos_token_id"]
        self._ends = {*(ends if isinstance(ends, list | tuple) else [ends]), data.tokenizer.eos_token_id} - {None}
        kept["eos_token_id"] = sorted(self._ends) or None
        kind: Any = transformers.GenerationConfig
        self._config = kind(max_new_tokens=self._new, do_sample=False, num_beams=1, pad_token_id=data.pad, **kept)
        self._pads: bool | None = None if self._from_left else True
        """Whether the model takes no notice of padding on the left; None as long as it was not tried."""

    def write(self, rows: Sequence[int], batch_size: int, advance: Advance | None) -> list[str]:
        asked = prompts(self._loaded, rows, self._room)
        for row, prompt in zip(rows, asked, strict=True):
            if not prompt.ids:
                raise self._loaded.data.rows.error(row, "its prompt is empty")  # type: ignore[attr-defined]
        answers = [""] * len(rows)
        training = self._model.training
        self._model.eval()
        before = getattr(self._model, "generation_config", None)
        self._model.generation_config = self._config  # which would fill what another one leaves open
        try:
            with torch.no_grad(), quiet_transformers():
                for some in self._batches([prompt.ids for prompt in asked], batch_size):
                    for place, text in zip(some, self._texts([asked[i].ids for i in some]), strict=True):
                        answers[place] = text
                    if advance is not None:
                        advance(len(some))
        except (GradmergeError, MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a config may describe a model that can be built but not run
            raise InputError(f"the model cannot generate: {first_line(error)}") from error
        finally:
            self._model.generation_config = before
            self._model.train(training)
        return answers

    def _batches(self, ids: Sequence[list[int]], batch_size: int) -> Iterator[list[int]]:
        """Rows of about the same length together; of exactly the same where padding would be seen."""
        order = sorted(range(len(ids)), key=lambda place: -len(ids[place]))
        while order:
            some = order[:batch_size]
            if len({len(ids[place]) for place in some}) > 1 and not self._takes_padding([ids[i] for i in some]):
                some = [place for place in some if len(ids[place]) == len(ids[some[0]])]
            yield some
            order = order[len(some) :]

    def _takes_padding(self, ids: Sequence[list[int]]) -> bool:
        """Whether the shortest of some rows gets the same logits alone and padded; a recurrent state may not."""
        if self._pads is None:
            once = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
            config = type(self._config)(**{**self._config.to_diff_dict(), **once})
            several = (self._inputs([ids[-1]]), self._inputs([ids[0], ids[-1]]))
            made = [self._model.generate(**inputs, generation_config=config) for inputs in several]
            alone, beside = (one.logits[0][-1].double() for one in made)
            self._pads = bool((alone - beside).abs().max() <= 0.02 * alone.abs().max())
        return self._pads

    def _inputs(self, ids: Sequence[list[int]]) -> dict[str, Any]:
        side, pad = "left" if self._from_left else "right", self._loaded.data.pad  # type: ignore[attr-defined]
        mask = padded([[1] * len(row) for row in ids], 0, side)
        device = input_device(self._model)
        return {"input_ids": padded(ids, pad, side).to(device), "attention_mask": mask.to(device)}

    def _texts(self, ids: Sequence[list[int]]) -> list[str]:
        inputs = self._inputs(ids)
        written = self._model.generate(**inputs, generation_config=self._config)
        tokenizer: Any = self._loaded.data.tokenizer  # type: ignore[attr-defined]
        texts = []
        for row in written[:, inputs["input_ids"].shape[1] if self._from_left else 1 :].tolist():
            end = next((place for place, token in enumerate(row) if token in self._ends), len(row))
            texts.append(str(tokenizer.decode(row[:end], skip_special_tokens=True)))
        return texts


def _lengths(positions: int | None, wanted: int | None, in_one: bool) -> tuple[int, int | None]:
    """Tokens to write, and those that a prompt may have; ``in_one`` sequence both share the model's positions."""
    if positions is None:
        return wanted or NEW_TOKENS, None
    new = wanted if wanted is not None else min(NEW_TOKENS, positions // 2 if in_one else positions - 1)
    room = positions - new if in_one else None
    if new < 1 or (room is not None and room < 1) or new >= positions:
        raise InputError(
            f"--max-new-tokens {new}: the model has positions for {positions} tokens, the prompt's among them"
        )
    return new, room
