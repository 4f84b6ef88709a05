"""Does a removal survive quantization, and fine-tuning on a part of the forget set?"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn
from transformers.pytorch_utils import Conv1D

from ..common.training import Training, fine_tune
from .workload import Workload

#: Weights that share one scale.
BLOCK = 64


@torch.no_grad()
def quantize(model: nn.Module) -> nn.Module:
    """Round the linear layers of a model to 4 bits (NF4), in place.

    The weights are those that bitsandbytes loads with ``load_in_4bit``, dequantized to float32. As there, embeddings
    and the output layer are not quantized.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    for layer in model.modules():
        if isinstance(layer, nn.Linear | Conv1D) and layer is not output:
            # A Conv1D has its inputs in rows; blocks are along the inputs.
            weight = layer.weight.T.contiguous() if isinstance(layer, Conv1D) else layer.weight
            rounded = dequantize_4bit(*quantize_4bit(weight.data, blocksize=BLOCK, quant_type="nf4"))
            layer.weight.copy_(rounded.T if isinstance(layer, Conv1D) else rounded)
    return model


def relearn(model: Any, workload: Workload, training: Training, share: float, folder: Path) -> Any:
    """Fine-tune a model in place on a random share of the forget set."""
    rows = random.Random(workload.seed).sample(list(workload.forget), max(1, round(share * len(workload.forget))))
    how = {"seed": workload.seed, "device": workload.device}
    fine_tune(model.train(), rows, workload.collate, folder, training, **how)
    return model.eval()
