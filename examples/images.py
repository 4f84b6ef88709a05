"""Two models that each saw half of the digits, merged into one that knows them all.

    python examples/images.py

The data are the 1,797 handwritten digits that scikit-learn ships. A base has seen a few of every digit. One model is
fine-tuned from it on the digits 0 to 4, another on 5 to 9, and neither sees the other's data. Each forgets what it is
not shown. Can their weights be put together so that one model knows all ten?
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from transformers import PrinterCallback, Trainer, TrainingArguments, ViTConfig, ViTForImageClassification, logging

import gradmerge as gm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("-o", "--out", type=Path, default=Path("example-images"), help="where models go")
parser.add_argument("--quick", action="store_true", help="train for a fraction of the time")
chosen = parser.parse_args()
out = chosen.out
if out.exists() and any(out.iterdir()):
    parser.error(f"{out} is not empty: remove it, or choose another folder with -o")
logging.set_verbosity_error()
logging.disable_progress_bar()
epochs = 1 if chosen.quick else 12

# Images of 8 × 8 pixels with values from 0 to 16. A quarter is set aside for the test; of the rest, the base gets 200
# images of all digits, and what remains is shared out by digit.

digits = load_digits()
images = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32)
labels = torch.tensor(digits.target)
order = torch.tensor(np.random.RandomState(0).permutation(len(labels)))
test, for_base, rest = order[:450], order[450:650], order[650:]
low, high = rest[labels[rest] < 5], rest[labels[rest] >= 5]


def rows(chosen):
    return [{"pixel_values": images[i], "labels": int(labels[i])} for i in chosen]


# The model is a vision transformer with two layers, made on the spot and trained with the ordinary Trainer.

torch.manual_seed(0)
model = ViTForImageClassification(
    ViTConfig(
        image_size=8,
        patch_size=2,
        num_channels=1,
        num_labels=10,
        hidden_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
)


def settings(folder, epochs, lr):
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        learning_rate=lr,
        per_device_train_batch_size=16,
        lr_scheduler_type="linear",
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        max_grad_norm=0.0,
    )


def fit(trainer):
    trainer.remove_callback(PrinterCallback)
    trainer.train()


fit(Trainer(model, settings(out / "base", 8 * epochs, 2e-3), train_dataset=rows(for_base)))
model.save_pretrained(out / "base")

# What the base must not lose is said by its curvature: for every weight, how much the base's own images care about
# it. It is measured once and kept beside the model.

batches = [
    {"pixel_values": images[part], "labels": labels[part]} for part in for_base.split(50)
]  # any iterable of batches will do
gm.estimate_curvature(model, batches).save(out / "base" / "curvature")

# Each task is fine-tuned under that curvature: a penalty ½ · strength · Σ H_0 (θ − θ_base)² that holds on to the
# weights the base needs and lets go of the others. The callback adds up the squared gradients of single examples on
# every fifth batch, so that the model's own curvature is there when training ends.

for name, part in {"low": low, "high": high}.items():
    tuned = ViTForImageClassification.from_pretrained(out / "base")
    trainer = gm.PriorTrainer(
        tuned,
        settings(out / name, epochs, 5e-4),
        train_dataset=rows(part),
        prior=out / "base" / "curvature",
        strength=1.0,
        curvature=gm.CurvatureCallback("pass"),
    )
    fit(trainer)
    trainer.save_model()

# Both merges read the same three folders. Task arithmetic adds the two changes; gradient matching weighs every entry by
# curvature, which it finds in the `curvature/` folders.

for method in ("task-arithmetic", "gradient-matching"):
    recipe = {"method": method, "base": str(out / "base"), "models": [str(out / "low"), str(out / "high")]}
    gm.merge(recipe, out / method)

# For comparison, one model that was fine-tuned on both halves together, which is what a merge tries to reach without
# bringing the data together.

joint = ViTForImageClassification.from_pretrained(out / "base")
fit(Trainer(joint, settings(out / "joint", epochs, 5e-4), train_dataset=rows(rest)))
joint.save_pretrained(out / "joint")


@torch.no_grad()
def accuracy(folder, part):
    model = ViTForImageClassification.from_pretrained(folder)
    return float((model(images[part]).logits.argmax(1) == labels[part]).float().mean())


print(f"{'accuracy, %':<18} {'0 to 4':>8} {'5 to 9':>8} {'all':>8}")
for name in ("base", "low", "high", "task-arithmetic", "gradient-matching", "joint"):
    parts = (test[labels[test] < 5], test[labels[test] >= 5], test)
    print(f"{name:<18} " + " ".join(f"{100 * accuracy(out / name, part):>8.1f}" for part in parts))
