"""The reference implementation that the theory page shows gives what `gm.calibrate` gives."""

from __future__ import annotations

import copy
import runpy

import torch
from docs.pages import DOCS
from transformers import BertConfig, BertForSequenceClassification

import gradmerge as gm


def test_the_reference_implementation_of_calibration_equals_the_library() -> None:
    reference = runpy.run_path(str(DOCS.parent / "examples/calibration.py"))["calibrate"]
    torch.manual_seed(0)
    shape = {"vocab_size": 30, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
    merged = BertForSequenceClassification(BertConfig(**shape, num_hidden_layers=2)).eval()
    teachers, rows = {}, {}
    for task in ("yelp", "sst2"):
        teacher = copy.deepcopy(merged)
        with torch.no_grad():
            for parameter in teacher.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
        tokens, mask = torch.randint(2, 30, (6, 12)), torch.ones(6, 12, dtype=torch.long)
        mask[3:, 9:] = 0
        teachers[task] = teacher
        rows[task] = [
            {"input_ids": tokens[:4], "attention_mask": mask[:4]},
            {"input_ids": tokens[4:], "attention_mask": mask[4:]},
        ]
    slow = reference(merged, teachers, rows)
    fast = gm.calibrate(merged, rows, teachers=teachers, curvature="none", check=False, progress=False).model
    for name, parameter in fast.named_parameters():
        change = (parameter - merged.get_parameter(name)).norm()
        assert (parameter - slow.get_parameter(name)).norm() <= 1e-3 * change + 1e-6, name
    assert not torch.equal(slow.classifier.weight, merged.classifier.weight)
