"""The config of a PEFT adapter: whether it can be merged from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import InputError
from ..storage.links import require_within
from ..storage.smallfile import read_json

#: Settings that change what the adapter means, and that are not LoRA as in base + scale · BA.
UNSUPPORTED = {
    "layer_replication": "layer replication",
    "target_parameters": "LoRA on bare parameters",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "arrow routing",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
    "megatron_config": "Megatron layers",
}
#: Settings of adapters that are read, although they are more than base + scale · BA.
MORE_THAN_FACTORS = {
    "use_dora": "DoRA",
    "trainable_token_indices": "trainable tokens",
    "lora_bias": "LoRA with a bias of its own",
}
#: Initialisations that also change the base's weights, which the adapter file does not show.
CHANGES_BASE = {"pissa", "olora", "corda", "loftq", "lora_ga"}
ADVICE = "Merge it into its base with PEFT (merge_and_unload) first."


def is_adapter(folder: Path) -> bool:
    return (folder / "adapter_config.json").is_file()


def read_adapter_config(folder: Path) -> dict[str, Any]:
    path = folder / "adapter_config.json"
    require_within(path, folder)
    config = read_json(path)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise InputError(
            f"{folder}: a PEFT adapter of type {kind}; only LORA adapters can be merged from disk. {ADVICE}"
        )
    for key, what in UNSUPPORTED.items():
        if config.get(key):
            raise InputError(f"{folder}: the adapter uses {what} ({key}), which is not base + scale·BA. {ADVICE}")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.partition("_niter")[0].lower() in CHANGES_BASE:
        raise InputError(
            f"{folder}: the adapter was initialised with {init}, which changed the base's weights. Convert it to a "
            "plain LoRA adapter with PEFT first."
        )
    return config
