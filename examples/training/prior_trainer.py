"""Fine-tune two models with PriorTrainer, and merge them.

python examples/training/prior_trainer.py
"""

import random
from pathlib import Path

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

import gradmerge as gm

out = Path("example-prior-trainer")
# The words for label 0 and label 1 of each task.
SIGNS = {"base": (20, 21), "food": (22, 23), "films": (24, 25)}


def rows(task, count=200):
    """Rows of nine random words and one word that gives the label."""
    draw = random.Random(f"{task} {count}")
    found = [{"labels": draw.randrange(2)} for _ in range(count)]
    for row in found:
        filler = draw.choices(range(1, 20), k=9)
        row["input_ids"] = [*filler, SIGNS[task][row["labels"]]]
    return found


def tune(model, task, **how):
    arguments = TrainingArguments(
        str(out / task),
        num_train_epochs=3,
        per_device_train_batch_size=20,
        learning_rate=3e-3,
        max_grad_norm=0.0,  # curvature="adam" needs gradients without clipping
        use_cpu=True,
        save_strategy="no",
        report_to="none",
    )
    trainer = gm.PriorTrainer(model, arguments, train_dataset=rows(task), **how)
    trainer.train()
    trainer.save_model()


torch.manual_seed(0)
config = BertConfig(
    vocab_size=30,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=64,
)
base = BertForSequenceClassification(config)
tune(base, "base", strength=0.0, curvature="adam")
for task in ("food", "films"):
    tune(
        BertForSequenceClassification.from_pretrained(out / "base"),
        task,
        # H_0: a curvature folder, a gm.Curvature, "identity" or a number
        prior=out / "base" / "curvature",
        strength=1.0,
        curvature="adam",  # writes curvature/ beside the model
    )

# The merge finds curvature and penalty inside the models.
recipe = {
    "method": "gradient-matching",
    "base": str(out / "base"),
    "models": [str(out / "food"), str(out / "films")],
}
gm.merge(recipe, out / "merged", force=True)


def accuracy(model, task):
    test = rows(task, 100)
    labels = torch.tensor([row["labels"] for row in test])
    with torch.no_grad():
        logits = model(torch.tensor([row["input_ids"] for row in test])).logits
    return float((logits.argmax(1) == labels).double().mean())


for name in ("base", "food", "films", "merged"):
    model = BertForSequenceClassification.from_pretrained(out / name).eval()
    found = {task: accuracy(model, task) for task in ("food", "films")}
    print(f"{name:8}  food {found['food']:.2f}  films {found['films']:.2f}")
