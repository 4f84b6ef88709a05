"""What curvature is tested on: tiny random models of well-known families and of none, examples of unequal length."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers as t
from torch import Tensor, nn

from ..checkpoints.families import randomise
from .slow import MASKED, Example

t.utils.logging.set_verbosity_error()

#: Entries of gradients are held against the slow loop to this part of the largest.
EXACT, ROUNDED = 1e-9, 5e-6
PAD = 1
VOCABULARY = 23

_SIZES = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
_TEXT = _SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 16, "pad_token_id": PAD}
_BERT = _TEXT | {"num_labels": 3}
_LLAMA = _TEXT | {"num_key_value_heads": 2, "tie_word_embeddings": False}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "d_kv": 4,
    "d_ff": 12,
    "num_layers": 2,
    "num_heads": 2,
    "pad_token_id": PAD,
    "decoder_start_token_id": PAD,
    "relative_attention_num_buckets": 6,
    "relative_attention_max_distance": 8,
}
_VIT = _SIZES | {"image_size": 8, "patch_size": 4}
_CLIP_TEXT = _SIZES | {"vocab_size": VOCABULARY, "num_hidden_layers": 1, "max_position_embeddings": 8}


@dataclass(frozen=True)
class Family:
    """How a model is made, what its examples are, and what is claimed about measuring it."""

    build: Callable[[], nn.Module]
    kind: str
    """Of its examples: text, language, pairs, images or tuples."""
    output: str
    tolerance: float = EXACT
    slow: tuple[str, ...] = ()
    """Parts of the names of parameters that are measured the slow way."""
    zero: tuple[str, ...] = ()
    """Parts of the names of parameters whose gradient is zero: softmax does not feel what all its inputs share."""
    dtype: torch.dtype = torch.float64

    def model(self, dtype: torch.dtype | None = None) -> Any:
        torch.manual_seed(0)
        model = self.build()
        randomise(model.parameters(), 1, 0.2)
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                assert module.running_mean is not None and module.running_var is not None
                nn.init.normal_(module.running_mean, 0.0, 0.3)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
        if (dtype or self.dtype) == torch.float64 and getattr(
            getattr(model, "config", None), "_experts_implementation", None
        ) == "grouped_mm":
            model.set_experts_implementation("eager")  # the other has no float64
        return model.eval().to(dtype or self.dtype)

    def examples(self, dtype: torch.dtype | None = None) -> list[Example]:
        return [
            {name: value.to(dtype or self.dtype) if value.is_floating_point() else value for name, value in e.items()}
            for e in EXAMPLES[self.kind]()
        ]


def _of(model: Any, config: Any, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: model(config(**settings))


def _text() -> list[Example]:
    tokens = _tokens((4, 6, 3, 5, 6))
    return [{"input_ids": ids, "labels": torch.tensor(n % 3)} for n, ids in enumerate(tokens)]


def _language() -> list[Example]:
    """Every other example has a prompt that does not count, one repeats a token, and no first token is predicted."""
    tokens = _tokens((4, 6, 3, 5, 6))
    tokens[1][2] = tokens[1][4] = tokens[1][1]
    labels = [ids.clone() for ids in tokens]
    for number, some in enumerate(labels):
        some[: 1 + number % 2] = MASKED
    return [{"input_ids": ids, "labels": some} for ids, some in zip(tokens, labels, strict=True)]


def _pairs() -> list[Example]:
    sources, targets = _tokens((4, 6, 3, 5, 6)), _tokens((3, 2, 5, 4, 6), 7)
    targets[0] = sources[0][:3].clone()  # a table that serves both sides feels both
    return [{"input_ids": s, "labels": u} for s, u in zip(sources, targets, strict=True)]


def _images(size: int = 8) -> list[Example]:
    generator = torch.Generator().manual_seed(3)
    images = torch.randn(5, 3, size, size, generator=generator, dtype=torch.float64)
    return [{"pixel_values": image, "labels": torch.tensor(n % 3)} for n, image in enumerate(images)]


def _tuples() -> list[Example]:
    return [{"0": e["pixel_values"], "labels": e["labels"]} for e in _images()]


EXAMPLES: dict[str, Callable[[], list[Example]]] = {
    "text": _text,
    "language": _language,
    "pairs": _pairs,
    "images": _images,
    "large images": functools.partial(_images, 32),
    "tuples": _tuples,
}


def _tokens(lengths: Sequence[int], seed: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator) for length in lengths]


def batch_of(examples: Sequence[Example], left: bool = False, longer: int = 0) -> Any:
    """Examples side by side, padded to the longest and ``longer`` places more."""
    first = examples[0]
    if "0" in first:
        return tuple(torch.stack([e[name] for e in examples]) for name in sorted(first))
    batch = {}
    for name in first:
        fill = MASKED if name == "labels" else PAD
        batch[name] = _padded([e[name] for e in examples], fill, left, longer)
    if "input_ids" in first:
        ones = [torch.ones_like(e["input_ids"]) for e in examples]
        batch["attention_mask"] = _padded(ones, 0, left, longer)
    return batch


def _padded(values: Sequence[Tensor], fill: int, left: bool, longer: int) -> Tensor:
    if values[0].dim() != 1:
        return torch.stack(list(values))
    longest = max(map(len, values)) + longer
    table = torch.full((len(values), longest), fill)
    for row, value in zip(table, values, strict=True):
        row[longest - len(value) if left else 0 :][: len(value)] = value
    return table


def batches_of(examples: Sequence[Example], sizes: Sequence[int], **padding: Any) -> list[Any]:
    """Examples in their order, in batches of these sizes."""
    assert sum(sizes) == len(examples)
    made, first = [], 0
    for size in sizes:
        made.append(batch_of(examples[first : first + size], **padding))
        first += size
    return made


class Scale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Token(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.token.expand(len(x), -1, -1)], 1)


class Net(nn.Module):
    """Convolutions and norms of every kind, and parameters that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.depthwise = nn.Conv2d(6, 12, 3, padding="same", groups=6, bias=False)
        self.act = nn.ReLU(inplace=True)
        self.circular = nn.Conv2d(12, 4, 2, padding=1, padding_mode="circular")
        self.line = nn.Conv1d(4, 8, 3, stride=2, padding=2, dilation=2, groups=2)
        self.rms = nn.RMSNorm(13)
        self.batch_norm = nn.BatchNorm1d(8)
        self.scale = Scale(13)
        self.token = Token(13)
        self.shift = nn.Parameter(torch.zeros(13))
        self.hidden = nn.Linear(13, 7)
        self.layer_norm = nn.LayerNorm((9, 7))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(63, 3)

    def forward(self, images: Tensor) -> Tensor:
        x = self.norm(self.conv(images))
        x = self.act(self.depthwise(x) + 0.1)
        x = self.circular(x).flatten(2)
        x = self.batch_norm(self.rms(self.line(x)))
        x = self.token(self.scale(x)) + self.shift
        x = self.layer_norm(self.dropout(self.hidden(x).tanh()))
        return self.head(x.flatten(1))


FAMILIES: Mapping[str, Family] = {
    "bert": Family(_of(t.BertForSequenceClassification, t.BertConfig, **_BERT), "text", "classes", zero=("key.bias",)),
    "bert, masked": Family(
        _of(t.BertForMaskedLM, t.BertConfig, **_BERT), "language", "tokens", zero=("key.bias",)
    ),
    "roberta": Family(
        _of(t.RobertaForSequenceClassification, t.RobertaConfig, **_BERT), "text", "classes", zero=("key.bias",)
    ),
    "albert": Family(
        _of(t.AlbertForSequenceClassification, t.AlbertConfig, **_BERT, embedding_size=4),
        "text", "classes", zero=("key.bias",),
    ),
    "gpt2": Family(
        _of(
            t.GPT2LMHeadModel, t.GPT2Config, vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2, n_head=2,
            bos_token_id=0, eos_token_id=0,
        ),
        "language", "next-token",
    ),
    "gpt2, classes": Family(
        _of(
            t.GPT2ForSequenceClassification, t.GPT2Config, vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=2,
            n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=PAD, num_labels=3,
        ),
        "text", "classes",
    ),
    "llama": Family(_of(t.LlamaForCausalLM, t.LlamaConfig, **_LLAMA), "language", "next-token", ROUNDED),
    "llama, tied": Family(
        _of(t.LlamaForCausalLM, t.LlamaConfig, **_LLAMA | {"tie_word_embeddings": True}),
        "language", "next-token", ROUNDED,
    ),
    "qwen3": Family(_of(t.Qwen3ForCausalLM, t.Qwen3Config, **_LLAMA, head_dim=6), "language", "next-token", ROUNDED),
    "gemma2": Family(
        _of(
            t.Gemma2ForCausalLM, t.Gemma2Config, **_LLAMA | {"tie_word_embeddings": True}, head_dim=6, sliding_window=5
        ),
        "language", "next-token", ROUNDED,
    ),
    "opt": Family(
        _of(
            t.OPTForCausalLM, t.OPTConfig, vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2,
            num_attention_heads=2, ffn_dim=12, max_position_embeddings=16, word_embed_proj_dim=6, pad_token_id=PAD,
        ),
        "language", "next-token", zero=("k_proj.bias",),
    ),
    "mixtral": Family(
        _of(t.MixtralForCausalLM, t.MixtralConfig, **_LLAMA, num_local_experts=3, num_experts_per_tok=2),
        "language", "next-token", ROUNDED,
    ),
    "qwen2-moe": Family(
        _of(
            t.Qwen2MoeForCausalLM, t.Qwen2MoeConfig, **_LLAMA, num_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=8, shared_expert_intermediate_size=6,
        ),
        "language", "next-token", ROUNDED,
    ),
    "gpt-oss": Family(
        _of(
            t.GptOssForCausalLM, t.GptOssConfig, **_LLAMA, num_local_experts=4, num_experts_per_tok=2, head_dim=4,
            bos_token_id=0, eos_token_id=0,
        ),
        "language", "next-token", ROUNDED,
    ),
    "deepseek-v3": Family(
        _of(
            t.DeepseekV3ForCausalLM, t.DeepseekV3Config, **_LLAMA, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
            topk_group=1, moe_intermediate_size=8, first_k_dense_replace=1, q_lora_rank=None, kv_lora_rank=4,
            qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, bos_token_id=0, eos_token_id=0,
        ),
        "language", "next-token", ROUNDED,
    ),
    "llama4": Family(
        _of(
            t.Llama4ForCausalLM, t.Llama4TextConfig, **_LLAMA, num_local_experts=3, num_experts_per_tok=1, head_dim=4,
            intermediate_size_mlp=12, bos_token_id=0, eos_token_id=0,
        ),
        "language", "next-token", ROUNDED,
    ),
    "t5": Family(_of(t.T5ForConditionalGeneration, t.T5Config, **_T5), "pairs", "tokens", ROUNDED),
    "bart": Family(
        _of(
            t.BartForConditionalGeneration, t.BartConfig, vocab_size=VOCABULARY, d_model=8, encoder_layers=2,
            decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=12,
            decoder_ffn_dim=12, max_position_embeddings=16, pad_token_id=PAD, decoder_start_token_id=2,
        ),
        "pairs", "tokens", zero=("k_proj.bias",),
    ),
    "vit": Family(
        _of(t.ViTForImageClassification, t.ViTConfig, **_VIT, num_labels=3),
        "images", "classes", zero=("k_proj.bias",),
    ),
    "clip": Family(
        lambda: t.CLIPForImageClassification(
            t.CLIPConfig(  # type: ignore[call-arg]
                text_config=_CLIP_TEXT,
                vision_config=_VIT,
                num_labels=3,
            )
        ),
        "images", "classes", zero=("k_proj.bias", "post_layernorm"),  # the head takes no notice of that norm
    ),
    "swin": Family(
        _of(
            t.SwinForImageClassification, t.SwinConfig, image_size=32, patch_size=4, embed_dim=4, depths=[2, 1],
            num_heads=[1, 2], window_size=4, num_labels=3,
        ),
        "large images", "classes", slow=("relative_position_bias_table",), zero=("k_proj.bias",),
    ),
    "convnext": Family(
        _of(
            t.ConvNextForImageClassification, t.ConvNextConfig, hidden_sizes=[4, 6], depths=[1, 1], num_stages=2,
            patch_size=2, image_size=8, num_labels=3, layer_scale_init_value=0.5,
        ),
        "images", "classes", slow=("embeddings.layernorm", "downsampling_layer.0"),
    ),
    "resnet": Family(
        _of(
            t.ResNetForImageClassification, t.ResNetConfig, embedding_size=4, hidden_sizes=[6, 8], depths=[1, 1],
            layer_type="basic", num_labels=3,
        ),
        "large images", "classes",
    ),
    "a net of convolutions and norms": Family(Net, "tuples", "classes"),
}  # fmt: skip

#: Families of which nothing is measured the slow way.
FAST = [name for name, family in FAMILIES.items() if not family.slow]
