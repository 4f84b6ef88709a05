"""The penalty in your own training loop, and curvature at the end.

python examples/training/plain_loop.py
"""

import random
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

import gradmerge as gm

out = Path("example-plain-loop")
draw = random.Random(0)
labels = [draw.randrange(2) for _ in range(200)]
texts = [[*draw.choices(range(1, 20), k=9), 20 + label] for label in labels]
batches = [
    {
        "input_ids": torch.tensor(texts[i : i + 20]),
        "labels": torch.tensor(labels[i : i + 20]),
    }
    for i in range(0, 200, 20)
]

torch.manual_seed(0)
config = BertConfig(
    vocab_size=30,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)
model = BertForSequenceClassification(config)
model.save_pretrained(out / "base")
curvature = gm.estimate_curvature(model, batches)
curvature.save(out / "base" / "curvature", force=True)

optimizer = gm.PriorAdamW(
    model,
    lr=3e-3,
    weight_decay=0.0,
    prior=gm.Curvature.load(out / "base" / "curvature"),
    strength=1.0,
)
model.train()
for batch in batches * 3:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

model.save_pretrained(out / "tuned")
# The merge reads the penalty and the curvature.
optimizer.record_penalty(out / "tuned", mean_over=len(labels))
curvature = gm.estimate_curvature(model.eval(), batches)
curvature.save(out / "tuned" / "curvature", force=True)
print(*sorted(path.name for path in (out / "tuned").iterdir()))
