"""Generate answers to rows of the data, greedily and in batches.

Of a model's generation config only the special tokens are used, so that the same weights always give the same text:
no sampling, no beams, no penalties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..curvature.offload import input_device
from ..errors import GradmergeError, InputError
from ..quiet import quiet_transformers
from ..text import first_line
from .loading import LoadedTask
from .text import Prompt, TokenizedData, num_positions, pad

#: Default of the maximum number of new tokens, if the model has positions for them.
NEW_TOKENS = 64
#: Keys of a model's generation config that are used.
SPECIAL_TOKENS = (
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
)

Advance = Callable[[int], None]
"""Called with the number of rows that are done."""


def prompts(loaded: LoadedTask, rows: Sequence[int], max_length: int | None = None) -> list[Prompt]:
    """Return the prompts of some rows, with at most ``max_length`` tokens."""
    data: Any = loaded.data
    if not isinstance(data, TokenizedData) or not hasattr(data, "prompt"):
        raise InputError(f"a model for {loaded.task} does not generate text; causal-lm and seq2seq models do")
    with quiet_transformers():
        return [data.prompt(row, max_length) for row in rows]


def generate(
    loaded: LoadedTask,
    model: Any,
    rows: Sequence[int],
    max_new_tokens: int | None = None,
    *,
    batch_size: int | None = None,
    advance: Advance | None = None,
) -> list[str]:
    """Generate a text for some rows of the data of a `causal-lm` or `seq2seq` task.

    Args:
        loaded: The data, its tokenizer, and the model whose special tokens are used.
        model: The model that generates: that of ``loaded``, or one like it with other weights.
        rows: Rows by number, from 0.
        max_new_tokens: The maximum number of new tokens; by default 64, or what the model has positions for.
        batch_size: Rows per batch. The texts do not depend on it.
        advance: Called with the number of rows of every batch that is done.

    Returns:
        A text for each row, without special tokens.
    """
    data: Any = loaded.data
    decoder_only = loaded.task != "seq2seq"
    max_new_tokens, max_prompt = _lengths(num_positions(loaded.model), max_new_tokens, decoder_only)
    ids = [prompt.ids for prompt in prompts(loaded, rows, max_prompt)]
    for row, prompt_ids in zip(rows, ids, strict=True):
        if not prompt_ids:
            raise data.rows.error(row, "its prompt is empty")
    config = _generation_config(loaded, max_new_tokens)
    texts = [""] * len(rows)
    training, own_config = model.training, getattr(model, "generation_config", None)
    model.eval()
    model.generation_config = config  # generate() would take the keys that are None from the model's own
    try:
        with torch.no_grad(), quiet_transformers():
            order = sorted(range(len(rows)), key=lambda index: -len(ids[index]))  # similar lengths in a batch
            padding: bool | None = None if decoder_only else True
            while order:
                batch = order[: batch_size or loaded.batch_size]
                lengths = {len(ids[index]) for index in batch}
                if padding is None and len(lengths) > 1:
                    padding = _ignores_padding(model, config, [ids[batch[0]], ids[batch[-1]]], data.pad_token)
                if len(lengths) > 1 and not padding:
                    batch = [index for index in batch if len(ids[index]) == len(ids[batch[0]])]
                inputs = _inputs(model, [ids[index] for index in batch], data.pad_token, decoder_only)
                output = model.generate(**inputs, generation_config=config)
                new_tokens = output[:, inputs["input_ids"].shape[1] if decoder_only else 1 :].tolist()
                for index, tokens in zip(batch, new_tokens, strict=True):
                    end = next((n for n, token in enumerate(tokens) if token in (config.eos_token_id or ())), None)
                    texts[index] = str(data.tokenizer.decode(tokens[:end], skip_special_tokens=True))
                if advance is not None:
                    advance(len(batch))
                order = order[len(batch) :]
    except (GradmergeError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a config may describe a model that can be built but not run
        raise InputError(f"the model cannot generate: {first_line(error)}") from error
    finally:
        model.generation_config = own_config
        model.train(training)
    return texts


def _generation_config(loaded: LoadedTask, max_new_tokens: int) -> Any:
    import transformers

    data: Any = loaded.data
    own_config = getattr(loaded.model, "generation_config", None)
    tokens = {name: getattr(own_config, name, None) for name in SPECIAL_TOKENS}
    ends = tokens["eos_token_id"]
    ends = {*(ends if isinstance(ends, list | tuple) else [ends]), data.tokenizer.eos_token_id} - {None}
    tokens["eos_token_id"] = sorted(ends) or None
    config_class: Any = transformers.GenerationConfig
    return config_class(
        max_new_tokens=max_new_tokens, do_sample=False, num_beams=1, pad_token_id=data.pad_token, **tokens
    )


def _inputs(model: nn.Module, ids: Sequence[Sequence[int]], pad_token: int, decoder_only: bool) -> dict[str, Tensor]:
    side = "left" if decoder_only else "right"
    inputs = {
        "input_ids": pad(ids, pad_token, side),
        "attention_mask": pad([[1] * len(prompt) for prompt in ids], 0, side),
    }
    return {name: value.to(input_device(model)) for name, value in inputs.items()}


def _ignores_padding(model: Any, config: Any, ids: Sequence[Sequence[int]], pad_token: int) -> bool:
    """Whether the last of some prompts gets the same logits alone and padded. The state of an RNN may differ."""
    options = {"max_new_tokens": 1, "output_logits": True, "return_dict_in_generate": True}
    config = type(config)(**{**config.to_diff_dict(), **options})
    batches = [_inputs(model, ids[-1:], pad_token, True), _inputs(model, ids, pad_token, True)]
    outputs = [model.generate(**inputs, generation_config=config) for inputs in batches]
    alone, padded = (output.logits[0][-1].double() for output in outputs)
    return bool((alone - padded).abs().max() <= 0.02 * alone.abs().max())


def _lengths(positions: int | None, max_new_tokens: int | None, decoder_only: bool) -> tuple[int, int | None]:
    """Return the numbers of new tokens and of prompt tokens. In a decoder-only model both share the positions."""
    if positions is None:
        return max_new_tokens or NEW_TOKENS, None
    if max_new_tokens is None:
        max_new_tokens = min(NEW_TOKENS, positions // 2 if decoder_only else positions - 1)
    if not 1 <= max_new_tokens < positions:
        raise InputError(
            f"max_new_tokens={max_new_tokens}: the model has positions for {positions} tokens, including the prompt"
        )
    return max_new_tokens, positions - max_new_tokens if decoder_only else None
