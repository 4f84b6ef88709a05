"""The penalty and the curvature callback in a plain Trainer of transformers.

python examples/training/any_trainer.py
"""

import random
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import gradmerge as gm

out = Path("example-any-trainer")
draw = random.Random(0)
data = []
for _ in range(200):
    label = draw.randrange(2)
    words = [*draw.choices(range(1, 20), k=9), 20 + label]
    data.append({"input_ids": words, "labels": label})


def batch(rows):
    return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}


batches = [batch(data[i : i + 20]) for i in range(0, 200, 20)]

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

arguments = TrainingArguments(
    str(out / "tuned"),
    num_train_epochs=3,
    per_device_train_batch_size=20,
    use_cpu=True,
    save_strategy="no",
    report_to="none",
)
optimizer = gm.PriorAdamW(
    model,
    lr=3e-3,
    weight_decay=0.0,
    prior=out / "base" / "curvature",
    strength=1.0,
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    optimizers=(optimizer, None),
    callbacks=[gm.CurvatureCallback("pass")],
)
trainer.train()
trainer.save_model()
optimizer.record_penalty(arguments.output_dir, mean_over=len(data))
print(*sorted(path.name for path in (out / "tuned").iterdir()))
