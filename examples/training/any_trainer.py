"""The prior and the callback in a plain Trainer of transformers: python examples/training/any_trainer.py"""

import random
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import gradmerge as gm

out = Path("example-any-trainer")
draw = random.Random(0)
labels = [draw.randrange(2) for _ in range(200)]
data = [{"input_ids": [*draw.choices(range(1, 20), k=9), 20 + label], "labels": label} for label in labels]

torch.manual_seed(0)
config = BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
model = BertForSequenceClassification(config)
model.save_pretrained(out / "base")
batches = [{key: torch.tensor([row[key] for row in data[i : i + 20]]) for key in data[0]} for i in range(0, 200, 20)]
gm.estimate_curvature(model, batches).save(out / "base" / "curvature", force=True)

arguments = TrainingArguments(
    str(out / "tuned"),
    num_train_epochs=3,
    per_device_train_batch_size=20,
    use_cpu=True,
    save_strategy="no",
    report_to="none",
)
optimizer = gm.PriorAdamW(model, lr=3e-3, weight_decay=0.0, prior=out / "base" / "curvature", strength=1.0)
trainer = Trainer(
    model,
    arguments,
    train_dataset=data,
    optimizers=(optimizer, None),
    callbacks=[gm.CurvatureCallback("online")],
)
trainer.train()
trainer.save_model()
optimizer.record_penalty(arguments.output_dir, mean_over=len(data))
print(*sorted(path.name for path in (out / "tuned").iterdir()))
