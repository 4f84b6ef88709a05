"""What goes with the weights: what a model needs, from its own folder, and nothing else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import gradmerge as gm

from ..making import near, random_state, write_model

NEEDED = {
    *("generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "spiece.model", "sentencepiece.bpe.model"),
    *("tokenizer.model", "qwen.tiktoken", "tekken.json", "preprocessor_config.json", "processor_config.json"),
    *("video_preprocessor_config.json", "chat_template.jinja", "chat_template.json", "LICENSE", "LICENSE.txt"),
    *("NOTICE", "USE_POLICY.md", "source.spm"),
}
UNWANTED = {
    *("api_key.txt", "secrets.env", "train.jsonl", "train.log", "events.out.tfevents.1", "state.pkl", "run.sh"),
    *("modeling_custom.py", "LICENSE.py", "notes.txt", "data.csv", "id_rsa", "wandb-metadata.json"),
    "credentials.json",
}
SILENT = {".env", "README.md", "pytorch_model.bin", "optimizer.pt", "trainer_state.json", "all_results.json"}
MADE = {"README.md", "gradmerge.json", "model.safetensors", "config.json"}


@pytest.fixture
def models(tmp_path: Path) -> list[Path]:
    state = random_state(0)
    return [
        write_model(tmp_path / "base", state, config={"base": True}),
        write_model(tmp_path / "a", near(state, 1)),
    ]


def merged(models: list[Path]) -> tuple[Path, list[str]]:
    out = models[0].parent / "out"
    recipe = {"method": "task-arithmetic", "base": str(models[0]), "models": [str(models[1])]}
    return out, list[str](gm.merge(recipe, out, force=True).notes)


def names(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}


def test_what_a_model_needs_is_copied_and_code_is_named(models: list[Path]) -> None:
    for name in NEEDED | SILENT:
        (models[0] / name).write_text(name)
    assert merged(models)[1] == []
    for name in UNWANTED:
        (models[0] / name).write_text(name)
    (models[0] / "checkpoint-5").mkdir()
    (models[0] / "additional_chat_templates").mkdir()
    (models[0] / "additional_chat_templates" / "rag.jinja").write_text("{{ x }}")
    (models[0] / "additional_chat_templates" / "evil.py").write_text("")
    out, notes = merged(models)
    assert names(out) == NEEDED | MADE | {"additional_chat_templates/rag.jinja"}
    assert all((out / name).read_text() == name for name in NEEDED)
    assert json.loads((out / "config.json").read_text())["base"]
    assert len(notes) == 1 and "modeling_custom.py" in notes[0]


def test_links_are_followed_only_inside_of_the_model(models: list[Path], tmp_path: Path) -> None:
    """A vocabulary that is a link to a key, to the environment, to a device, a FIFO or a folder stays out."""
    (tmp_path / "id_rsa").write_text("secret")
    links = {
        "vocab.txt": tmp_path / "id_rsa",
        "vocab.json": "/proc/self/environ",
        "LICENSE": "/dev/zero",
        "tokenizer.json": "../id_rsa",
        "merges.txt": tmp_path / "nowhere",
        "additional_chat_templates": tmp_path,
    }
    for name, target in links.items():
        (models[0] / name).symlink_to(target)
    os.mkfifo(models[0] / "generation_config.json")
    (models[0] / "files").mkdir()
    (models[0] / "files" / "t").write_text("kept")
    (models[0] / "special_tokens_map.json").symlink_to("files/t")
    out, _ = merged(models)
    assert names(out) == MADE | {"special_tokens_map.json"}
    assert (out / "special_tokens_map.json").read_text() == "kept"
