"""Small models for the tests of calibration and distillation."""

from __future__ import annotations

import copy

import torch
import transformers as t

from gradmerge.refinement.blocks import BlockModel, HiddenCache
from gradmerge.refinement.calibrate import PARTS, CalibrationInputs, Candidate, Settings, calibrate_layers
from gradmerge.refinement.rows import TaskRows
from gradmerge.refinement.structure import find_structure

TEXT = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 40}
TOKENS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def _gpt2():
    config = t.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=40, n_positions=32, **TOKENS)
    return t.GPT2LMHeadModel(config)


def _t5():
    sizes = {"d_model": 16, "d_kv": 8, "num_layers": 2, "num_heads": 2, "d_ff": 24, "vocab_size": 40}
    tokens = {"decoder_start_token_id": 2, "pad_token_id": 2, "eos_token_id": 1}
    return t.T5ForConditionalGeneration(t.T5Config(**sizes, **tokens))


def _convnext():
    config = t.ConvNextConfig(hidden_sizes=[8, 12], depths=[1, 2], num_stages=2, image_size=16, patch_size=4)
    return t.ConvNextForImageClassification(config)


def _mixtral():
    return t.MixtralForCausalLM(t.MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4, **TOKENS))


def _gpt_oss():
    sizes = {"num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
    return t.GptOssForCausalLM(t.GptOssConfig(**TEXT, **sizes, **TOKENS))


EXPERTS = {"mixtral": _mixtral, "gpt-oss": _gpt_oss}
FAMILIES = {
    "bert": lambda: t.BertForSequenceClassification(t.BertConfig(**TEXT)),
    "mpnet": lambda: t.MPNetForSequenceClassification(t.MPNetConfig(**TEXT)),
    "gpt2": _gpt2,
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT, num_key_value_heads=1, **TOKENS)),
    "t5": _t5,
    "vit": lambda: t.ViTForImageClassification(
        t.ViTConfig(**{k: v for k, v in TEXT.items() if k != "vocab_size"}, image_size=8, patch_size=4)
    ),
    "convnext": _convnext,
    **EXPERTS,
}


def make(name, tasks=2, scale=0.1):
    """A merge, and a fine-tuned model per task: the base plus noise, and the mean of them."""
    torch.manual_seed(0)
    base = FAMILIES[name]().eval().requires_grad_(False)
    for parameter in base.parameters():  # norms and biases of fresh models are 0 or 1
        parameter.add_(0.05 * torch.randn_like(parameter))
    teachers = {}
    for task in range(tasks):
        model = copy.deepcopy(base)
        for parameter in model.parameters():
            parameter.add_(scale * parameter.std(correction=0) * torch.randn_like(parameter))
        teachers[f"task{task}"] = model
    merged = copy.deepcopy(base)
    for key, parameter in merged.named_parameters():
        parameter.copy_(torch.stack([model.get_parameter(key) for model in teachers.values()]).mean(0))
    return merged, teachers


def rows(name, tasks=2, count=12, seed=1):
    """A padded batch of unlabeled rows per task: other words, or brighter images, in every task."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for task in range(tasks):
        if name in ("vit", "convnext"):
            size = 8 if name == "vit" else 16
            made[f"task{task}"] = {"pixel_values": 2 * task + torch.randn(count, 3, size, size, generator=generator)}
            continue
        first = 3 + 18 * task
        batch = {"input_ids": torch.randint(first, first + 18, (count, 7), generator=generator)}
        lengths = torch.randint(2, 8, (count,), generator=generator)
        lengths[0] = 7
        batch["attention_mask"] = (torch.arange(7)[None] < lengths[:, None]).long()
        if name == "t5":
            batch["decoder_input_ids"] = torch.randint(3, 40, (count, 5), generator=generator)
            short = torch.randint(1, 6, (count,), generator=generator)
            short[0] = 5
            batch["decoder_attention_mask"] = (torch.arange(5)[None] < short[:, None]).long()
        made[f"task{task}"] = batch
    return made


def split(batch, size):
    """A batch in smaller ones."""
    parts = {key: value.split(size) for key, value in batch.items()}
    return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]


def solve_all(merged, teachers, data, settings=None, *, cache=None, store=None, factors=None, epsilon=None):
    """Solve the layers of a merge with all rows; return the candidate with its weights."""
    cache = cache or HiddenCache(2**40)
    batches = {task: TaskRows(one[:1], one[1:]) for task, one in data.items()}
    inputs = CalibrationInputs(merged, teachers, batches, cache, store or HiddenCache(2**40), settings or Settings())
    candidate = Candidate("all rows", epsilon, PARTS)
    calibrate_layers(inputs, [candidate], factors)
    return candidate


def calibrated(merged, teachers, data, settings=None, **options):
    """A calibrated copy of a module, and what was done."""
    structure = find_structure(merged, next(iter(data.values()))[0])
    model = BlockModel(copy.deepcopy(merged), structure)
    guides = {task: BlockModel(one, structure) for task, one in teachers.items()}
    done = solve_all(model, guides, data, settings, **options)
    for name, value in done.weights.items():
        model.module.get_parameter(name).copy_(value.get())
    return model.module, done.report
