"""The config of a PEFT adapter: whether its fields are valid, and whether the adapter can be merged."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from ..errors import InputError
from ..io.small_files import read_json, require_within

#: Settings of adapters whose weights are not base + scale · BA.
UNSUPPORTED = (
    "layer_replication", "alora_invocation_tokens", "use_qalora", "use_bdlora", "arrow_config", "kasa_config",
    "monteclora_config", "megatron_config", "trainable_token_indices", "lora_bias",
)  # fmt: skip
#: Initializations that also change the base's weights, which the adapter's file does not show.
CHANGES_BASE = {"pissa", "olora", "corda", "loftq", "lora_ga"}
ADVICE = "Merge it into its base with PEFT (merge_and_unload) first."
#: Limits on the regular expressions of a config: seconds for all matches, and characters of one.
PATTERN_SECONDS = 10.0
PATTERN_LENGTH = 10_000


class _FieldTypes(BaseModel):
    """The types of the fields that gradmerge or PEFT reads. Other fields may have any type."""

    model_config = ConfigDict(strict=True)

    task_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int | None = None
    lora_alpha: FiniteFloat = 8
    lora_dropout: float | None = None
    rank_pattern: dict[str, int] | None = None
    alpha_pattern: dict[str, FiniteFloat] | None = None
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None
    exclude_modules: list[str] | str | None = None
    modules_to_save: list[str] | str | None = None
    layers_pattern: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    bias: str | None = None
    init_lora_weights: bool | str | None = None
    fan_in_fan_out: bool | None = None
    use_rslora: bool | None = None
    use_dora: bool | None = None
    lora_bias: bool | None = None
    ensure_weight_tying: bool | None = None


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    """Return the fields of adapter_config.json; raise if one has a wrong type, or the adapter cannot be merged."""
    path = folder / "adapter_config.json"
    require_within(path, folder)
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(f"{folder}: a PEFT adapter of type {kind}; only LORA adapters can be merged. {ADVICE}")
    try:
        _FieldTypes.model_validate(config)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field, value = first["loc"][0], repr(first["input"])[:80]
        raise InputError(f"{path}: {field} is invalid ({value}): {first['msg']}") from None
    for key in UNSUPPORTED:
        if config.get(key):
            raise InputError(f"{folder}: the adapter uses {key}, which is not base + scale · BA. {ADVICE}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter")[0].lower() in CHANGES_BASE:
        raise InputError(
            f"{folder}: the adapter was initialized with {init}, which changed the base's weights. Convert it to a "
            "plain LoRA adapter with PEFT first."
        )
    return config


class PatternMatcher:
    """Matches names against the regular expressions of one adapter config, within one time limit for all of them.

    Python's ``re`` has no time limit, and a pattern from a stranger can take forever.
    """

    def __init__(self, config: Path) -> None:
        self._config, self._seconds_left = config, PATTERN_SECONDS

    def fullmatch(self, pattern: str, name: str) -> bool:
        import regex  # type: ignore[import-untyped]

        begin = time.perf_counter()
        try:
            if len(pattern) > PATTERN_LENGTH or self._seconds_left <= 0:
                raise TimeoutError("too long")
            return regex.fullmatch(pattern, name, timeout=self._seconds_left) is not None
        except (TimeoutError, regex.error, RecursionError, OverflowError, ValueError) as error:
            raise InputError(
                f"{self._config}: the regular expression {pattern[:80]!r} is not valid, or the patterns take longer "
                f"than {PATTERN_SECONDS:g} seconds ({error}). Replace them by names."
            ) from error
        finally:
            self._seconds_left -= time.perf_counter() - begin
