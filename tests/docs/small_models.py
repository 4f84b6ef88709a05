"""Small models under the names of models on the Hub, for the commands that the pages show."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }} {{ m['content'] }}<|im_end|>{% endfor %}"


def write_hub_models(folder: Path) -> None:
    """Write what the quick start downloads: models whose configs differ as those of Qwen2.5 do, and rows of text."""
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<|endoftext|>"))
    words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<|endoftext|>", eos_token="<|im_end|>")
    shape = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "intermediate_size": 32,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
    }
    base = Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=0, max_window_layers=24))
    for name, layers in (("Qwen2.5-0.5B", 24), ("Qwen2.5-0.5B-Instruct", 21), ("Qwen2.5-Coder-0.5B-Instruct", 24)):
        model = base if name == "Qwen2.5-0.5B" else Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=2))
        model.config.max_window_layers = layers
        if model is not base:
            state = {key: value + 0.01 * torch.randn_like(value) for key, value in base.state_dict().items()}
            model.load_state_dict(state)
            tokenizer.chat_template = TEMPLATE
        model.save_pretrained(folder / "Qwen" / name)
        tokenizer.save_pretrained(folder / "Qwen" / name)
    for name in ("chat", "code"):
        rows = [{"text": "a question and its answer " * (1 + n % 3)} for n in range(40)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
