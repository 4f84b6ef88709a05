"""Two LoRA adapters of a small language model, merged with curvature of the weights that they make.

    python examples/causal_lm_lora.py

The text is the part of Python's reference manual that every Python ships for `help()`. A small Llama is trained from
scratch on most topics. Two adapters are then tuned on topics that it has not seen: formatting and methods of strings,
and the debugger. Merged, they should be better than the base on both.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from pydoc_data.topics import topics

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import ByteLevelBPETokenizer
from transformers import (
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainingArguments,
    logging,
)

import gradmerge as gm

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("-o", "--out", type=Path, default=Path("example-causal-lm"), help="where models go")
parser.add_argument("--quick", action="store_true", help="train for a fraction of the time")
chosen = parser.parse_args()
out = chosen.out
if out.exists() and any(out.iterdir()):
    parser.error(f"{out} is not empty: remove it, or choose another folder with -o")
logging.set_verbosity_error()
logging.disable_progress_bar()

# A paragraph is an example. Topics of the manual contain one another, so a paragraph that belongs to a task is taken
# out of the base's data. Every fifth is kept for the test, in files that `gradmerge` reads.

of_task = {"strings": ("formatstrings", "string-methods"), "debugger": ("debugger",)}
of_task["base"] = tuple(name for name in topics if not any(name in names for names in of_task.values()))
texts, seen = {}, set()
for task, names in of_task.items():
    paragraphs = [" ".join(p.split()) for name in names for p in topics[name].split("\n\n")]
    texts[task] = list(dict.fromkeys(p for p in paragraphs if len(p) > 60 and p not in seen))
    seen.update(texts[task])
    if chosen.quick:
        texts[task] = texts[task][:150]
    for split, rows in {"test": texts[task][::5], "train": [p for i, p in enumerate(texts[task]) if i % 5]}.items():
        (out / "data").mkdir(parents=True, exist_ok=True)
        (out / "data" / f"{task}-{split}.jsonl").write_text("".join(json.dumps({"text": p}) + "\n" for p in rows))

# The tokenizer is trained on the base's text, and the model is a Llama of two layers.

bpe = ByteLevelBPETokenizer()
bpe.train_from_iterator(texts["base"], vocab_size=1000, special_tokens=["<pad>", "<s>", "</s>"], show_progress=False)
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=bpe._tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", model_max_length=96
)
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=96,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
)


def rows(task, split):
    lines = (out / "data" / f"{task}-{split}.jsonl").read_text().splitlines()
    return [tokenizer(json.loads(line)["text"], truncation=True) for line in lines]


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


collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
fit(Trainer(model, settings(out / "base", 6, 3e-3), train_dataset=rows("base", "train"), data_collator=collator))
model.save_pretrained(out / "base")
tokenizer.save_pretrained(out / "base")

# The curvature of the base, disk to disk this time. The loss of a paragraph is the sum over its tokens.

gm.estimate_curvature(
    out / "base", out / "data" / "base-train.jsonl", out=out / "base" / "curvature", batch_size=32, max_length=96
)

# An adapter W + s·BA starts at B = 0, and only A and B are trained. The prior therefore is on them:
# ½ · strength · (‖A − A_start‖² + ‖B‖²), which keeps the adapter small. The base's curvature is about W, so it cannot
# be the prior here. A merge needs the curvature of the full weights: `gm.estimate_curvature` estimates it from the
# saved adapter.

for task in ("strings", "debugger"):
    base = LlamaForCausalLM.from_pretrained(out / "base")
    torch.manual_seed(0)
    modules = ["q_proj", "v_proj", "up_proj", "down_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=modules)
    adapted = get_peft_model(base, lora)
    trainer = gm.PriorTrainer(
        adapted,
        settings(out / task, 10, 2e-3),
        train_dataset=rows(task, "train"),
        data_collator=collator,
        prior="identity",
        strength=0.1,
    )
    fit(trainer)
    trainer.save_model()
    data = out / "data" / f"{task}-train.jsonl"
    gm.estimate_curvature(out / task, data, out=out / task / "curvature", batch_size=32, max_length=96)

# The merge forms each adapter's weights tensor by tensor, and writes a whole model.

for method in ("task-arithmetic", "gradient-matching"):
    recipe = {"method": method, "base": str(out / "base"), "models": [str(out / "strings"), str(out / "debugger")]}
    gm.merge(recipe, out / method)

# Perplexity of a token on paragraphs that nobody has seen; lower is better.

print(f"{'perplexity':<18} {'strings':>9} {'debugger':>9} {'base':>9}")
for name in ("base", "strings", "debugger", "task-arithmetic", "gradient-matching"):
    found = [
        gm.evaluate(str(out / name), str(out / "data" / f"{task}-test.jsonl"), batch_size=32, max_length=96)[
            "perplexity"
        ]
        for task in ("strings", "debugger", "base")
    ]
    print(f"{name:<18} " + " ".join(f"{value:>9.2f}" for value in found))
