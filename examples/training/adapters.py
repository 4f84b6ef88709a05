"""Two LoRA adapters with curvature of the weights that they make, merged.

python examples/training/adapters.py
"""

import random
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import gradmerge as gm

out = Path("example-adapters")
STEPS = {"twos": 2, "threes": 3}


def rows(step):
    """Texts that count in steps, so that the next number can be learned."""
    starts = random.Random(step).choices(range(40), k=100)
    texts = [[(start + step * n) % 40 for n in range(12)] for start in starts]
    return [{"input_ids": text, "labels": text} for text in texts]


torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)
base = LlamaForCausalLM(config)
ones = torch.tensor([row["input_ids"] for row in rows(1)])
optimizer = torch.optim.AdamW(base.parameters(), lr=3e-3)
for _ in range(60):  # the base counts in ones
    base(ones, labels=ones).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
base.eval().save_pretrained(out / "base")
curvature = gm.estimate_curvature(base, [{"input_ids": ones, "labels": ones}])
curvature.save(out / "base" / "curvature", force=True)

for task, step in STEPS.items():
    adapted = get_peft_model(
        LlamaForCausalLM.from_pretrained(out / "base"),
        LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"),
    )
    arguments = TrainingArguments(
        str(out / task),
        num_train_epochs=6,
        learning_rate=1e-2,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = gm.PriorTrainer(
        adapted,
        arguments,
        train_dataset=rows(step),
        prior="identity",
        strength=0.1,
    )
    trainer.train()
    trainer.save_model()  # the adapter
    # The curvature of the full weights, which the merge needs.
    full = adapted.merge_and_unload().requires_grad_(True)
    texts = torch.tensor([row["input_ids"] for row in rows(step)])
    batch = {"input_ids": texts, "labels": texts}
    curvature = gm.estimate_curvature(full, [batch])
    curvature.save(out / task / "curvature", force=True)

recipe = {
    "method": "gradient-matching",
    "base": str(out / "base"),
    "models": [str(out / "twos"), str(out / "threes")],
}
gm.merge(recipe, out / "merged", force=True)

merged = LlamaForCausalLM.from_pretrained(out / "merged").eval()
for name, model in {"base": base, "merged": merged}.items():
    for task, step in STEPS.items():
        texts = torch.tensor([row["input_ids"] for row in rows(step)])
        with torch.no_grad():
            loss = model(texts, labels=texts).loss
        print(f"{name} on {task}: loss {loss:.2f} per token")
