"""Write the tokenizer, the chat templates and the token ids of the result."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...io.small_files import read_json
from ..compat.config_diff import parts
from .chat_template import TEMPLATE_PATTERNS, Templates, write_templates
from .union import OutputTokenizer
from .vocabulary import TOKENIZER_FILES

CONFIGS = ("config.json", "generation_config.json")
#: Keys of configs with token ids: `eos_token_id`, `image_token_index`, `bad_words_ids`, ….
TOKEN_KEYS = re.compile(r".*_token_(id|ids|index)|bad_words_ids|(begin_)?suppress_tokens|force_words_ids")


@dataclass
class ResultFiles:
    """Changes to the tokenizer files and configs that are copied from the template model."""

    tokenizer: OutputTokenizer | None = None
    rows: int = 0
    """Rows of the embeddings, including rows without a token."""
    from_template: bool = True
    """The tokenizer is that of the template model, possibly extended."""
    configs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The configs beside a tokenizer of another model. Their token ids replace those of the template model."""
    templates: Templates | None = None
    """Chat templates that replace those of the tokenizer."""
    reads: list[Path] = field(default_factory=list)
    """Files that the result depends on."""
    notes: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Change the files that were copied to a folder."""
        if self.tokenizer is not None:
            self._write_tokenizer(folder, self.tokenizer)
            for path in (folder / name for name in CONFIGS):
                if path.is_file():
                    before = read_json(path)
                    after = self._config(before, path.name, self.tokenizer)
                    if after != before:
                        path.write_text(json.dumps(after, indent=2) + "\n", "utf-8")
        if self.templates is not None:
            write_templates(folder, self.templates)

    def _write_tokenizer(self, folder: Path, tokenizer: OutputTokenizer) -> None:
        source = tokenizer.source.folder
        copied = {path.name: path for path in tokenizer.copied}
        removed = TOKENIZER_FILES.split()
        if not self.from_template:
            removed += TEMPLATE_PATTERNS
            paths = (path for pattern in TEMPLATE_PATTERNS for path in source.glob(pattern))
            copied |= {str(path.relative_to(source)): path for path in paths}
        for path in [path for pattern in removed for path in folder.glob(pattern)]:
            path.unlink(missing_ok=True)
        for name, path in copied.items():
            (folder / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, folder / name)
        for name, text in tokenizer.written.items():
            (folder / name).write_text(text, "utf-8")

    def _config(self, config: dict[str, Any], name: str, tokenizer: OutputTokenizer) -> dict[str, Any]:
        """Return a config with the number of rows and the token ids of the result."""
        config = json.loads(json.dumps(config))
        text = config.get("text_config")
        size = config.get("vocab_size", text.get("vocab_size") if isinstance(text, dict) else None)
        source = dict(parts(self.configs.get(name, {})))
        named = {f"{kind}_id": tokenizer.ids[token] for kind, token in tokenizer.source.special.items()}
        for path, section in list(parts(config)):
            assert isinstance(section, dict)
            if size is not None and section.get("vocab_size") == size:
                section["vocab_size"] = self.rows
            if self.from_template:
                continue
            for key in [key for key in section if TOKEN_KEYS.fullmatch(key)]:
                value = section.pop(key)
                if name not in self.configs and key in named:
                    section[key] = value if value is None else named[key]
            section.update((key, ids) for key, ids in source.get(path, {}).items() if TOKEN_KEYS.fullmatch(key))
        for kind, row in tokenizer.special.items():
            if config.get(f"{kind}_id") is None:
                config[f"{kind}_id"] = row
        return dict(config)
