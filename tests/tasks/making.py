"""Tiny random checkpoints with their tokenizers and image processors, and small data sets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    BertTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.utils import logging

from ..checkpoints.families import randomise

logging.set_verbosity_error()
logging.disable_progress_bar()

#: Every word that the tokenizers below know; others become the unknown token.
KNOWN = (
    "a an the film plot actor scene music story ending good bad great awful dull bright slow quick loved hated "
    "liked was is it i they we not very never again what who where paris rome blue red sky house cat dog runs "
    "sleeps eats . , ? !"
)
WORDS = KNOWN.split()


def sentences(count: int, seed: int = 0, shortest: int = 3, longest: int = 12) -> list[str]:
    """Random sentences of unequal length, made of ``WORDS``."""
    generator = np.random.default_rng(seed)
    return [
        " ".join(generator.choice(WORDS, size=int(generator.integers(shortest, longest + 1)))) for _ in range(count)
    ]


def write_jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def labelled(count: int = 12, labels: int = 2, seed: int = 0) -> list[dict[str, Any]]:
    """Rows with a text and the number of its class."""
    classes = np.random.default_rng(seed + 1).integers(0, labels, size=count)
    return [{"text": text, "label": int(label)} for text, label in zip(sentences(count, seed), classes, strict=True)]


def word_tokenizer(
    *, bos: bool = False, pad: bool = True, eos_after: bool = False, max_length: int = 64
) -> PreTrainedTokenizerFast:
    """A tokenizer of whole words: <unk> 0, </s> 1, <s> 2, <pad> 3, then ``WORDS``.

    ``bos`` puts <s> before every text, ``eos_after`` puts </s> behind it; without ``pad`` there is no padding token.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    vocabulary = {word: number for number, word in enumerate(["<unk>", "</s>", "<s>", "<pad>", *WORDS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos or eos_after:
        template = f"{'<s> ' if bos else ''}$A{' </s>' if eos_after else ''}"
        special = [("<s>", 2), ("</s>", 1)]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token="<unk>",
        eos_token="</s>",
        bos_token="<s>",
        pad_token="<pad>" if pad else None,
        model_max_length=max_length,
    )


VOCABULARY = len(WORDS) + 4


#: The sizes of BERT and ViT, in their configs.
SIZES: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def tiny_bert_checkpoint(folder: Path, labels: int = 2, seed: int = 0, **config: Any) -> Path:
    """A BERT classifier with a WordPiece vocabulary. ``problem_type``, ``label2id`` and the like go into its config."""
    tokenizer = bert_tokenizer(folder)
    settings = SIZES | {"vocab_size": len(tokenizer), "max_position_embeddings": 40, "num_labels": labels}
    return _save(folder, BertForSequenceClassification, BertConfig(**settings | config), seed, tokenizer)


def tiny_gpt2_checkpoint(folder: Path, seed: int = 0, pad: bool = False, **config: Any) -> Path:
    """A GPT-2. Its tokenizer has </s>, adds no special token, and has a padding token with ``pad`` only."""
    settings: dict[str, Any] = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    settings |= {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 1}
    tokenizer = word_tokenizer(pad=pad, max_length=32)
    return _save(folder, GPT2LMHeadModel, GPT2Config(**settings | config), seed, tokenizer)


def tiny_llama_checkpoint(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A Llama with grouped attention. Its tokenizer puts <s> before every text."""
    settings = SIZES | {"vocab_size": VOCABULARY, "num_key_value_heads": 1, "max_position_embeddings": 64}
    settings |= {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 3, "tie_word_embeddings": False}
    return _save(folder, LlamaForCausalLM, LlamaConfig(**settings | config), seed, word_tokenizer(bos=True))


def tiny_t5_checkpoint(folder: Path, seed: int = 0, **config: Any) -> Path:
    """A T5. Its tokenizer puts </s> behind every text."""
    settings: dict[str, Any] = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2}
    settings |= {"vocab_size": VOCABULARY, "pad_token_id": 3, "eos_token_id": 1, "decoder_start_token_id": 3}
    tokenizer = word_tokenizer(eos_after=True)
    return _save(folder, T5ForConditionalGeneration, T5Config(**settings | config), seed, tokenizer)


def tiny_vit_checkpoint(folder: Path, labels: int = 3, channels: int = 3, seed: int = 0, **config: Any) -> Path:
    """A ViT for 8 × 8 images, whose processor scales to [0, 1], then normalizes by mean 0.4, deviation 0.3."""
    settings = SIZES | {"image_size": 8, "patch_size": 4, "num_channels": channels, "num_labels": labels}
    _save(folder, ViTForImageClassification, ViTConfig(**settings | config), seed)
    facts = {
        "image_processor_type": "ViTImageProcessor",
        "do_resize": True,
        "size": {"height": 8, "width": 8},
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.4] * channels,
        "image_std": [0.3] * channels,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(facts))
    return folder


def bert_tokenizer(folder: Path) -> BertTokenizer:
    """A WordPiece tokenizer of ``WORDS``."""
    folder.mkdir(parents=True, exist_ok=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (folder / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    return BertTokenizer(str(folder / "vocab.txt"), model_max_length=40)


def _save(folder: Path, model_class: Any, config: Any, seed: int, tokenizer: Any = None) -> Path:
    """Save a random model, also with random biases and norms, and its tokenizer. Dropout is off."""
    for name in vars(config):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)
    torch.manual_seed(seed)
    model = model_class(config)
    randomise(model.parameters(), seed + 1000, 0.1)
    model.eval().save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    return folder


def write_adam_state(model: Any, folder: Path) -> None:
    """Save the state of AdamW after a step with gradients of ones."""
    optimizer = torch.optim.AdamW(list(model.named_parameters()))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")


def write_sentence_model(
    folder: Path,
    seed: int = 0,
    *,
    pooling: str | list[str] = "mean",
    first: str = "",
    kind: str = "bert",
    like: Path | None = None,
) -> Path:
    """As sentence-transformers saves it."""
    place = folder / first
    place.mkdir(parents=True)
    torch.manual_seed(seed if like is None else 0)
    model: Any
    if kind == "bert":
        tokenizer = bert_tokenizer(place)
        model = BertModel(BertConfig(vocab_size=len(tokenizer), max_position_embeddings=40, **SIZES))
        tokenizer.save_pretrained(place)
    else:
        model = LlamaModel(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
        word_tokenizer(bos=True).save_pretrained(place)
    randomise(model.parameters(), 100, 0.2)
    if like is not None:
        model = AutoModel.from_pretrained(like / first)
        randomise(model.parameters(), seed, 0.05)
    model.save_pretrained(place)
    modules = [(first, "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    entries = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in modules]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    (place / "sentence_bert_config.json").write_text('{"max_seq_length": 16, "do_lower_case": false}')
    return folder
