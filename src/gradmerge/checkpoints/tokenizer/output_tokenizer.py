"""What a result says of its vocabulary beside the weights: tokenizer, chat template, and token ids in configs."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...io.small_files import read_json
from ...text import to_json
from ..compat.config_diff import parts
from .chat_template import DEFAULT, FURTHER, PLAIN_FILE, TEMPLATE_FILES, Templates
from .result_tokenizer import ResultTokenizer
from .vocabulary import TOKENIZER_FILES

CONFIG, GENERATION = "config.json", "generation_config.json"
#: Keys of configs that hold rows of the vocabulary: `eos_token_id`, `image_token_index`, `bad_words_ids`, ….
TOKEN_KEYS = re.compile(r".*_token_(id|ids|index)|bad_words_ids|(begin_)?suppress_tokens|force_words_ids")


@dataclass
class ResultFiles:
    """Changes to the small files that are copied from the template."""

    tokenizer: ResultTokenizer | None = None
    rows: int = 0
    """Rows of the embeddings, with those that mean no token."""
    from_template: bool = True
    """Whether the tokenizer is the template's own, or an extension of it."""
    number: Callable[[int], int | None] = field(default=lambda number: number)
    """The row of the result for a row of the template; None where its token is in the result no more."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """config.json and generation_config.json of the tokenizer's own model."""
    templates: Templates | None = None
    """Chat templates that take the place of the tokenizer's own."""
    reads: list[Path] = field(default_factory=list)
    """Files that the result depends on."""
    notes: list[str] = field(default_factory=list)

    @property
    def settled(self) -> tuple[str, ...]:
        """Keys of the recipe that have been seen to: differences in these are no concern of a comparison any more."""
        return ("chat_template",) if self.tokenizer is None else ("chat_template", "tokenizer")

    def write(self, folder: Path) -> None:
        """Change the files of a folder that those of the template were copied to."""
        if self.tokenizer is not None:
            self._write_tokenizer(folder, self.tokenizer)
            for name in (CONFIG, GENERATION):
                if (path := folder / name).is_file():
                    before = read_json(path)
                    after = self.config(before, name)
                    if after != before:
                        path.write_text(json.dumps(after, indent=2) + "\n", "utf-8")
        if self.templates is not None:
            _write_templates(folder, self.templates)

    def _write_tokenizer(self, folder: Path, tokenizer: ResultTokenizer) -> None:
        _remove(folder, TOKENIZER_FILES.split())
        for path in tokenizer.copied:
            shutil.copyfile(path, folder / path.name)
        for name, text in tokenizer.written.items():
            (folder / name).write_text(text, "utf-8")
        if not self.from_template:
            _remove(folder, TEMPLATE_FILES)
            for pattern in TEMPLATE_FILES:
                for path in tokenizer.source.folder.glob(pattern):
                    to = folder / path.relative_to(tokenizer.source.folder)
                    to.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, to)

    def config(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        """A config with the result's number of rows and ids of tokens."""
        assert self.tokenizer is not None
        config = json.loads(json.dumps(config))
        text = config.get("text_config")
        stated = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        theirs = dict(parts(self.configs.get(name, {})))
        for place, section in list(parts(config)):
            assert isinstance(section, dict)
            if stated is not None and section.get("vocab_size") == stated:
                section["vocab_size"] = self.rows
            own = theirs.get(place, {})
            for key in [key for key in section if TOKEN_KEYS.fullmatch(key)]:
                section[key] = own[key] if key in own else _mapped(section[key], self.number)
            section.update({key: own[key] for key in own if key not in section and TOKEN_KEYS.fullmatch(key)})
        for kind, number in self.tokenizer.special.items():
            if config.get(f"{kind}_id") is None:
                config[f"{kind}_id"] = number
        return dict(config)


def _mapped(value: Any, number: Callable[[int], int | None]) -> Any:
    """Ids of tokens, in lists or alone, as rows of the result; those that it does not have are left out."""
    if isinstance(value, list):
        found = [_mapped(item, number) for item in value]
        return [item for item in found if item is not None]
    return number(value) if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else value


def _write_templates(folder: Path, templates: Mapping[str, str]) -> None:
    """Templates in files of their own, as transformers writes them, and nowhere else."""
    processor = folder / "chat_template.json"
    had_processor = processor.is_file()
    _remove(folder, TEMPLATE_FILES)
    for name, text in templates.items():
        path = folder / (PLAIN_FILE if name == DEFAULT else f"{FURTHER}/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, "utf-8")
    if had_processor and DEFAULT in templates:
        processor.write_text(to_json({"chat_template": templates[DEFAULT]}) + "\n", "utf-8")
    config_path = folder / "tokenizer_config.json"
    if config_path.is_file():
        config = read_json(config_path)
        if config.pop("chat_template", None) is not None:
            config_path.write_text(to_json(config) + "\n", "utf-8")


def _remove(folder: Path, patterns: Sequence[str]) -> None:
    for pattern in patterns:
        for path in folder.glob(pattern):
            path.unlink()
