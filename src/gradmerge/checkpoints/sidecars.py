"""The small files of a model that a merged model needs: config, tokenizer, templates, license."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from ..io.small_files import read_json
from ..text import some
from .checkpoint import Checkpoint, innermost
from .tokenizer import TEMPLATE_FILES, TOKENIZER_FILES, files_of

MAX_BYTES = 100_000_000
#: Files that are copied. A folder can also hold keys, data, logs and code, which are not.
COPIED = (
    f"{TOKENIZER_FILES} {TEMPLATE_FILES} *tokenizer*.json config.json generation_config.json "
    "*preprocessor_config.json processor_config.json LICENSE* LICENCE* COPYING* NOTICE* USE_POLICY* "
    "modules.json config_sentence_transformers.json sentence_*_config.json"
)
#: Also copied from a subfolder of a sentence-transformers model.
COPIED_FROM_MODULES = f"{COPIED} *_config.json"
NEVER = {".py", ".pkl", ".pickle", ".sh"}


def sidecars(checkpoint: Checkpoint) -> dict[str, Path]:
    """Return the files of a model's folder that are copied, by relative path. An adapter has those of its base."""
    checkpoint = innermost(checkpoint)
    folder = checkpoint.folder
    if folder is None:
        return {}
    copied: dict[str, Path] = {}
    for module in ("", *checkpoint.modules):
        for path in sorted(files_of(folder / module, COPIED_FROM_MODULES if module else COPIED)):
            if path.stat().st_size <= MAX_BYTES and path.suffix.lower() not in NEVER:
                copied[path.relative_to(folder).as_posix()] = path
    return copied


def code_notes(checkpoint: Checkpoint) -> list[str]:
    """Return a note about code in a model's folder, which is not copied."""
    folder = innermost(checkpoint).folder
    code = [] if folder is None else sorted(path.name for path in folder.glob("*.py"))
    return (
        [f"{checkpoint.label}: code is not copied: {some(code, 8)}. Copy it yourself if you trust it"] if code else []
    )


def library_of(folder: Path) -> str | None:
    """Return the library that loads a model's folder, by its name in model cards."""
    if (folder / "modules.json").is_file():
        return "sentence-transformers"
    if not (folder / "config.json").is_file():
        return None
    config = read_json(folder / "config.json")
    return "timm" if "architecture" in config and "model_type" not in config else "transformers"


def copy_sidecars(checkpoint: Checkpoint, folder: Path, dtype: str) -> None:
    """Copy the small files, and write the changes that views made to the config and ``dtype`` into config.json."""
    for module in checkpoint.modules:
        (folder / module).mkdir(exist_ok=True)
    for name, path in sidecars(checkpoint).items():
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / name)
    path = folder / "config.json"
    if not path.is_file():
        return
    copied = read_json(path)
    config = dict(copied if checkpoint.config == innermost(checkpoint).config else checkpoint.config)
    if dtype != "auto":
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = dtype
    if config != copied:
        path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")
