"""The small files of a model that go with its weights: config, tokenizer, templates, licence, and nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..io.small_files import lies_within, read_json
from ..text import some
from .checkpoint import Checkpoint
from .compat.compare import matches
from .dequantize import DequantisedCheckpoint
from .open import PIPELINE, stem_of
from .quantization import without_quantisation
from .views import beneath

MAX_BYTES = 100_000_000
#: Names that a model needs beside its weights. Its folder may also hold keys, data, logs and code, which stay there.
NEEDED = (
    "config.json generation_config.json *tokenizer*.json special_tokens_map.json added_tokens.json tekken.json "
    "*vocab*.json *vocab*.txt vocab.bpe merges.txt bpe.codes dict.txt normalizer.json *.spm *.tiktoken spiece.model "
    "spm.model *tokenizer*.model sentencepiece*.model *preprocessor_config.json processor_config.json "
    "chat_template.json chat_template.jinja additional_chat_templates/*.jinja "
    "LICENSE* LICENCE* COPYING* NOTICE* USE_POLICY* "
    "modules.json config_sentence_transformers.json sentence_*_config.json model_index.json"
)
#: Of a module of sentence-transformers, or a part of a diffusers pipeline, in a folder of its own.
NEEDED_OF_MODULES = f"{NEEDED} *_config.json"
#: Left out without a word: weights in any format, what is written anew, reports, and what belongs to a training run.
EXPECTED = (
    "*.safetensors *.bin *.pt *.pth *.ckpt *.h5 *.msgpack *.onnx *.gguf *.ot *.npz *.lock *.index.json .* README.md "
    "gradmerge.json gradmerge_penalty.json adapter_config.json trainer_state.json *_results.json curvature penalty "
    "additional_chat_templates report.html losses.* steps.csv trade-off.*"
)
NEVER = "*.py *.pkl *.pickle *.sh"


@dataclass(frozen=True)
class Sidecars:
    """The files of a model's folder that a merged model needs as well, by their names there, and what else it holds."""

    copied: dict[str, Path]
    left_out: list[str]

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.copied.values())

    def note(self, label: str) -> list[str]:
        """Says what stays behind."""
        left = some(self.left_out, 8)
        return [f"{label}: only what a model needs is copied to the result; not copied: {left}"] if left else []


def sidecars(checkpoint: Checkpoint) -> Sidecars:
    """What is copied from a model's folder (of an adapter: its base's), and what is not."""
    checkpoint = bottom(checkpoint)
    folder = checkpoint.folder
    if folder is None:
        return Sidecars({}, [])
    copied: dict[str, Path] = {}
    left_out: list[str] = []
    for module, path in _candidates(folder, checkpoint.modules):
        name = path.relative_to(folder).as_posix()
        patterns = NEEDED_OF_MODULES if module else NEEDED
        needed = matches(path.relative_to(folder / module).as_posix(), patterns.split())
        # A regular file of this model, also behind a link, and not too large to be a side file.
        can_be_copied = path.is_file() and lies_within(path, folder) and path.stat().st_size <= MAX_BYTES
        if needed and can_be_copied and not matches(name.lower(), NEVER.split()):
            copied[name] = path
        elif not matches(name, EXPECTED.split()):
            left_out.append(name + ("/" if path.is_dir() else ""))
    return Sidecars(copied, left_out)


def _candidates(folder: Path, modules: tuple[str, ...]) -> Iterator[tuple[str, Path]]:
    """The files of a model's folder, its chat templates and its modules, each with its module."""
    templates = folder / "additional_chat_templates"
    for path in sorted(folder.iterdir()):
        if path.name not in modules:
            yield "", path
    for path in sorted(templates.iterdir()) if templates.is_dir() and lies_within(templates, folder) else ():
        yield "", path
    for module in modules:
        for path in sorted((folder / module).iterdir()):
            yield module, path


def bottom(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint at the bottom, whose folder holds the files that a result needs."""
    return list(beneath(checkpoint))[-1]


def stems(checkpoint: Checkpoint) -> dict[str, str]:
    """Module → what its files of weights are called, "" being the model's own."""
    folder = bottom(checkpoint).folder
    return {module: "model" if folder is None else stem_of(folder / module) for module in ("", *checkpoint.modules)}


def library_of(folder: Path) -> str | None:
    """The library that loads a model's folder, as model cards name it."""
    if (folder / PIPELINE).is_file() or stem_of(folder) != "model":
        return "diffusers"
    if (folder / "modules.json").is_file():
        return "sentence-transformers"
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    if config is None:
        return None
    return "timm" if "architecture" in config and "model_type" not in config else "transformers"


def copy_sidecars(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    """Copy the side files; what a view says otherwise than its model's config, and the dtype, go into config.json."""
    for module in checkpoint.modules:
        (folder / module).mkdir(exist_ok=True)
    for name, path in sidecars(checkpoint).copied.items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    plain = any(isinstance(below, DequantisedCheckpoint) for below in beneath(checkpoint))
    for config_path in (folder / module / "config.json" for module in ("", *checkpoint.modules)):
        if not config_path.is_file():
            continue
        stated, own = read_json(config_path), config_path.parent == folder
        config = dict(checkpoint.config if own and checkpoint.config != bottom(checkpoint).config else stated)
        config = without_quantisation(config) if plain else config
        if dtype != "auto" and own:
            config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
        if config != stated:
            config_path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
