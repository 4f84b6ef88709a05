"""Two LoRA adapters, with curvature of the weights that they make, merged: python examples/training/adapters.py"""

import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import gradmerge as gm

out = Path("example-adapters")


def rows(step):
    """Sequences that count in steps, so that the next number can be learned."""
    draw = random.Random(step)
    texts = [[(first + step * place) % 40 for place in range(12)] for first in draw.choices(range(40), k=100)]
    return [{"input_ids": text, "labels": text} for text in texts]


torch.manual_seed(0)
config = LlamaConfig(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
base = LlamaForCausalLM(config)
batches = [{key: torch.tensor([row[key] for row in rows(1)]) for key in ("input_ids", "labels")}]
optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
for batch in batches * 60:  # the base counts in ones
    base(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
base.save_pretrained(out / "base")
gm.estimate_curvature(base.eval(), batches).save(out / "base" / "curvature", force=True)

for task, step in {"twos": 2, "threes": 3}.items():
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(out / "base"),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    arguments = TrainingArguments(
        str(out / task), num_train_epochs=6, learning_rate=1e-2, use_cpu=True, save_strategy="no", report_to="none"
    )
    trainer = gm.PriorTrainer(
        adapted,
        arguments,
        train_dataset=rows(step),
        prior="identity",
        strength=0.1,
        curvature=gm.CurvatureCallback("pass", adapted=True),
    )
    trainer.train()
    trainer.save_model()  # the adapter, with curvature/ of the full weights beside it

recipe = {"method": "gradient-matching", "base": str(out / "base"), "models": [str(out / "twos"), str(out / "threes")]}
gm.merge(recipe, out / "merged", force=True)

merged = LlamaForCausalLM.from_pretrained(out / "merged").eval()
for name, model in {"base": base, "merged": merged}.items():
    for task, step in {"twos": 2, "threes": 3}.items():
        texts = torch.tensor([row["input_ids"] for row in rows(step)])
        with torch.no_grad():
            print(f"{name} on {task}: loss {model(texts, labels=texts).loss:.2f} per token")
