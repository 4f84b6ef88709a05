"""Is it a class or a function? Told from docstrings, in the styles of three projects.

    python examples/sequence_classification.py

The data are docstrings in Python files that are installed here: the standard library's, torch's and those of
transformers. The first sentence is the text, and whether it describes a class or a function is the label. A base learns
it from the standard library. Torch and transformers write in other ways and about other things: one model is fine-tuned
on each, and the two are merged.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sysconfig
import warnings
from pathlib import Path

import numpy as np
import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertTokenizerFast,
    DataCollatorWithPadding,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    logging,
)

import gradmerge as gm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("-o", "--out", type=Path, default=Path("example-docstrings"), help="where models go")
parser.add_argument("--quick", action="store_true", help="fewer docstrings, and a fraction of the training")
chosen = parser.parse_args()
out = chosen.out
if out.exists() and any(out.iterdir()):
    parser.error(f"{out} is not empty: remove it, or choose another folder with -o")
logging.set_verbosity_error()
logging.disable_progress_bar()

# The files are parsed, not imported. Of every project come as many classes as functions, no sentence twice.

each = 50 if chosen.quick else 500
folders = {"stdlib": Path(sysconfig.get_paths()["stdlib"])} | {
    name: Path(importlib.util.find_spec(name).origin).parent for name in ("torch", "transformers")
}


def first_sentences(folder):
    """(sentence, is a class) of every docstring in the project's files."""
    others = {"site-packages", "test", "tests"}
    files = [p for p in sorted(folder.rglob("*.py")) if not others & set(p.relative_to(folder).parts)]
    for place in np.random.RandomState(0).permutation(len(files)):
        try:
            nodes = list(ast.walk(ast.parse(files[place].read_text(errors="ignore"))))
        except SyntaxError:
            continue
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and (doc := ast.get_docstring(node)):
                sentence = " ".join(doc.split("\n\n")[0].split()[:40])
                if len(sentence.split()) > 3:
                    yield sentence, isinstance(node, ast.ClassDef)


def write_rows(name, folder):
    """As many classes as functions, a quarter of them for the test."""
    found = {True: {}, False: {}}
    for sentence, is_class in first_sentences(folder):
        if len(found[is_class]) < each and sentence not in found[not is_class]:
            found[is_class][sentence] = None
        if min(map(len, found.values())) == each:
            break
    pairs = list(zip(found[True], found[False], strict=False))
    rows = [{"text": text, "label": label} for pair in pairs for text, label in zip(pair, (1, 0), strict=True)]
    (out / "data").mkdir(parents=True, exist_ok=True)
    for split, some in {"test": rows[: len(rows) // 4], "train": rows[len(rows) // 4 :]}.items():
        lines = "".join(json.dumps(row) + "\n" for row in some)
        (out / "data" / f"{name}-{split}.jsonl").write_text(lines)
    return rows


warnings.simplefilter("ignore", SyntaxWarning)  # of the files that are parsed
texts = {name: write_rows(name, folder) for name, folder in folders.items()}

# The tokenizer is trained on the sentences of the standard library, and the model is a BERT of two layers.

words = BertWordPieceTokenizer(lowercase=True)
words.train_from_iterator((row["text"] for row in texts["stdlib"]), vocab_size=2000, show_progress=False)
words.save_model(str(out))
tokenizer = BertTokenizerFast(str(out / "vocab.txt"), model_max_length=64)
torch.manual_seed(0)
model = BertForSequenceClassification(
    BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=64,
        id2label={0: "function", 1: "class"},
    )
)
collator = DataCollatorWithPadding(tokenizer)


def rows(*names):
    lines = [line for name in names for line in (out / "data" / f"{name}-train.jsonl").read_text().splitlines()]
    parsed = [json.loads(line) for line in lines]
    return [dict(tokenizer(row["text"], truncation=True)) | {"labels": row["label"]} for row in parsed]


def settings(folder, epochs, lr):
    return TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=1 if chosen.quick else epochs,
        learning_rate=lr,
        per_device_train_batch_size=16,
        warmup_steps=0.1,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
    )


def fit(trainer):
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def save(model, name):
    model.save_pretrained(out / name)
    tokenizer.save_pretrained(out / name)


fit(Trainer(model, settings(out / "stdlib", 5, 1e-3), train_dataset=rows("stdlib"), data_collator=collator))
save(model, "stdlib")

# The curvature of the base, on its own data: what should not be lost.

data = str(out / "data" / "stdlib-train.jsonl")
gm.estimate_curvature(str(out / "stdlib"), data, out=out / "stdlib" / "curvature", batch_size=32)

# Fine-tuning under that curvature. At strength 1 the base counts as if its curvature came from as many examples as the
# task has. Adam rescales gradients, so how much a strength does in training is something to try. The callback estimates
# each model's curvature on the way.

for name in ("torch", "transformers"):
    tuned = BertForSequenceClassification.from_pretrained(out / "stdlib")
    trainer = gm.PriorTrainer(
        tuned,
        settings(out / name, 3, 3e-4),
        train_dataset=rows(name),
        data_collator=collator,
        prior=out / "stdlib" / "curvature",
        strength=1.0,
        curvature=gm.CurvatureCallback("pass"),
    )
    fit(trainer)
    trainer.save_model()
    tokenizer.save_pretrained(out / name)

# Merge. Every model is found with its `curvature/` folder inside.

for method in ("task-arithmetic", "gradient-matching"):
    models = [str(out / "torch"), str(out / "transformers")]
    gm.merge({"method": method, "base": str(out / "stdlib"), "models": models}, out / method)

# And one model that was fine-tuned on both together, to compare with.

joint = BertForSequenceClassification.from_pretrained(out / "stdlib")
both = rows("torch", "transformers")
fit(Trainer(joint, settings(out / "joint", 3, 3e-4), train_dataset=both, data_collator=collator))
save(joint, "joint")

print(f"{'accuracy, %':<18} " + " ".join(f"{name:>13}" for name in [*folders, "mean"]))
for name in ("stdlib", "torch", "transformers", "task-arithmetic", "gradient-matching", "joint"):
    found = [
        gm.evaluate(str(out / name), str(out / "data" / f"{task}-test.jsonl"), batch_size=64)["accuracy"]
        for task in folders
    ]
    label = "base (stdlib)" if name == "stdlib" else name
    print(f"{label:<18} " + " ".join(f"{100 * value:>13.1f}" for value in [*found, sum(found) / len(found)]))
