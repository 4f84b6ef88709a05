"""Make small sentiment models and their data, in about ten seconds and without the network.

The guides in docs/ use these names: the base model `base`; `yelp` and `sst2`, which are fine-tuned from it;
and `joint`, which is trained on all data. Each task has training rows (`yelp.jsonl`), test rows (`yelp-test.jsonl`) and
rows without labels (`yelp-rows.jsonl`).

python examples/make_models.py             # into the current folder, where the guides run their commands
python examples/make_models.py tutorial    # into another folder
"""

import json
import os
import random
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

folder = Path(*sys.argv[1:2]).absolute()
folder.mkdir(parents=True, exist_ok=True)
os.chdir(folder)
transformers.utils.logging.disable_progress_bar()
torch.set_num_threads(1)  # as fast for models of this size, and much faster beside other programs

GOOD = {"base": ["good", "great", "nice"], "yelp": ["tasty", "fresh", "crisp"], "sst2": ["moving", "funny", "bold"]}
BAD = {"base": ["bad", "awful", "poor"], "yelp": ["stale", "greasy", "cold"], "sst2": ["dull", "clumsy", "trite"]}
FILLER = ["the", "a", "was", "and", "it", "we", "very", "so", "this", "one", "really", "quite", "again", "here"]
WORDS = ["[PAD]", "[UNK]", *FILLER, *(word for words in (*GOOD.values(), *BAD.values()) for word in words)]


def make_rows(name: str, count: int, seed: int) -> list[dict]:
    """Sentences of ten words, one of which says good (label 1) or bad (label 0)."""
    draw = random.Random(f"{name}{seed}")
    rows = []
    for _ in range(count):
        label = draw.randrange(2)
        opinion = (BAD, GOOD)[label]
        sentence = [*draw.choices(FILLER, k=9), draw.choice(opinion["base"][:1] + opinion[name])]
        draw.shuffle(sentence)
        rows.append({"text": " ".join(sentence), "label": label})
    return rows


def write(path: str, rows: list[dict]) -> None:
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(model, rows: list[dict], folder: str, steps: int, rate: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), rate)
    model.train()
    for step in range(steps):
        batch = random.Random(step).sample(rows, 20)
        inputs = tokenizer([row["text"] for row in batch], return_tensors="pt")
        model(**inputs, labels=torch.tensor([row["label"] for row in batch])).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


words = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")

rows = {name: make_rows(name, 200, seed=0) for name in ("base", "yelp", "sst2")}
for name in rows:
    write(f"{name}.jsonl", rows[name])
    write(f"{name}-test.jsonl", make_rows(name, 200, seed=1))
    write(f"{name}-rows.jsonl", [{"text": row["text"]} for row in make_rows(name, 200, seed=2)])

torch.manual_seed(1)
config = BertConfig(
    vocab_size=len(WORDS), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
)
train(BertForSequenceClassification(config), rows["base"], "base", steps=100, rate=1e-3)
for name in ("yelp", "sst2"):
    train(BertForSequenceClassification.from_pretrained("base"), rows[name], name, steps=200, rate=3e-4)
train(
    BertForSequenceClassification.from_pretrained("base"),
    [row for name in rows for row in rows[name]],
    "joint",
    steps=400,
    rate=3e-4,
)
print(f"Written to {folder}")
print("Models: base yelp sst2 joint. Data: NAME.jsonl, NAME-test.jsonl, and NAME-rows.jsonl without labels.")
