"""Two models tuned under the prior by PriorTrainer, and merged: python examples/training/prior_trainer.py"""

import random
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments

import gradmerge as gm

out = Path("example-prior-trainer")
SIGNS = {"base": (20, 21), "food": (22, 23), "films": (24, 25)}  # words that say bad (label 0) and good (label 1)


def rows(task, count=200):
    """Sentences of nine words without a meaning, and one that says good or bad as this task does."""
    draw = random.Random(f"{task} {count}")
    labels = [draw.randrange(2) for _ in range(count)]
    return [{"input_ids": [*draw.choices(range(1, 20), k=9), SIGNS[task][label]], "labels": label} for label in labels]


def tune(model, task, **how):
    arguments = TrainingArguments(
        str(out / task),
        num_train_epochs=3,
        per_device_train_batch_size=20,
        learning_rate=3e-3,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = gm.PriorTrainer(model, arguments, train_dataset=rows(task), **how)
    trainer.train()
    trainer.save_model()


torch.manual_seed(0)
config = BertConfig(vocab_size=30, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64)
tune(BertForSequenceClassification(config), "base", strength=0.0, curvature="pass")
for task in ("food", "films"):
    tune(
        BertForSequenceClassification.from_pretrained(out / "base"),
        task,
        prior=out / "base" / "curvature",  # H_0: a curvature folder, gm.Curvature, "identity" or a number
        strength=1.0,
        curvature="online",  # writes curvature/ beside the model
    )

recipe = {"method": "gradient-matching", "base": str(out / "base"), "models": [str(out / "food"), str(out / "films")]}
gm.merge(recipe, out / "merged", force=True)  # finds curvature and penalty inside the models

for name in ("base", "food", "films", "merged"):
    model = BertForSequenceClassification.from_pretrained(out / name).eval()
    print(f"{name:8}", end="")
    for task in ("food", "films"):
        test = rows(task, 100)
        with torch.no_grad():
            found = model(torch.tensor([row["input_ids"] for row in test])).logits.argmax(1)
        print(f"  {task} {(found == torch.tensor([row['labels'] for row in test])).double().mean():.2f}", end="")
    print()
