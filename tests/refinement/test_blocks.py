"""Running a model block by block: which blocks and layers are found, what is cached, and when a model runs whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import transformers as t
from torch import nn

from gradmerge import InputError
from gradmerge.refinement.blocks import (
    WHOLE,
    BlockModel,
    HiddenCache,
    RowStream,
    counted_positions,
    forward,
    tensors_in,
)
from gradmerge.refinement.structure import find_structure

from .calibration_families import calibrated, make, rows, split

REUSED = "run more than once or share their weight"


def run_stages(model, batches, cache):
    """The outputs of a model that runs block by block."""
    stream = RowStream(model, batches, cache)
    for stage in model.structure.stages:
        stream.run_stage(stage)
    found = [[v for v in stream.finish(n).values() if isinstance(v, torch.Tensor)] for n in range(len(batches))]
    stream.drop()
    return found


@pytest.mark.parametrize(("name", "limit"), [("bert", 2**40), ("gpt2", 0), ("t5", 0), ("vit", 0), ("mixtral", 0)])
def test_block_by_block_gives_the_outputs_of_the_whole_model(name, limit, tmp_path):
    model, _ = make(name)
    batches = split(rows(name)["task0"], 5)
    structure = find_structure(model, batches[0])
    assert structure.lists and not structure.notes
    cache = HiddenCache(limit, tmp_path)
    with torch.no_grad():
        found = run_stages(BlockModel(model, structure), batches, cache)
        for batch, outputs in zip(batches, found, strict=True):
            whole = [leaf for leaf in tensors_in(forward(model, batch)) if leaf.is_floating_point()]
            for one, other in zip(outputs, whole, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert (cache.spilled > 0) is (limit == 0)
    cache.close()
    assert not any(tmp_path.iterdir())


def test_the_cache_keeps_to_its_limit():
    cache = HiddenCache(1000)
    kept = [cache.put(torch.full((100,), float(n))) for n in range(5)]
    assert cache.nbytes <= 1000 and cache.spilled == 3 * 400
    assert [float(one.get()[7]) for one in kept] == [0, 1, 2, 3, 4]
    kept[0].drop()
    again = cache.put(torch.full((100,), 9.0))
    assert cache.nbytes <= 1000 and cache.spilled == 3 * 400 and float(again.get()[7]) == 9
    again.drop()
    cache.put(torch.zeros(150))  # memory of another shape is freed for it
    assert cache.nbytes <= 1000 and cache.spilled == 3 * 400
    cache.close()


def test_blocks_of_equal_size_are_read_into_the_same_memory(tmp_path):
    from gradmerge.refinement.model_io import open_model_files

    model, _ = make("llama")
    model.save_pretrained(tmp_path)
    files = open_model_files(str(tmp_path))
    source = files.source(torch.device("cpu"))
    structure = find_structure(files.module, rows("llama")["task0"], source)
    streamed, addresses = BlockModel(files.module, structure, source), set()
    for stage in structure.stages:
        with streamed.loaded(stage):
            weights = [files.module.get_parameter(name) for name in streamed.weights_of(stage)]
            if stage.is_block:
                addresses.add(weights[0].untyped_storage().data_ptr())
            for name, weight in zip(streamed.weights_of(stage), weights, strict=True):
                assert torch.equal(weight, model.get_parameter(name))
    assert len(structure.lists[0]) == 2 and len(addresses) == 1
    assert all(parameter.is_meta for parameter in files.module.parameters())


def test_layers_that_read_the_same_input_form_a_group():
    model, _ = make("llama")
    structure = find_structure(model, rows("llama")["task0"])
    groups = [[name.rpartition(".")[2] for name in group] for group in structure.groups["model.layers.1"]]
    assert groups == [["q_proj", "k_proj", "v_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_an_encoder_decoder_has_two_lists_of_blocks():
    model, _ = make("t5")
    structure = find_structure(model, rows("t5")["task0"])
    assert [len(blocks) for blocks in structure.lists] == [2, 2]
    assert structure.skipped[REUSED] == ["lm_head"]  # tied to the embedding
    decoder = [[n.rpartition(".")[2] for n in group] for group in structure.groups["decoder.block.0"]]
    assert ["k", "v"] in decoder and ["q", "k", "v"] in decoder


def test_padding_of_the_encoder_and_of_the_decoder_is_left_out():
    """More padding changes nothing, also if both sides then have the same length."""
    merged, teachers = make("t5")
    data = rows("t5")
    results = []
    for encoder, decoder in ((7, 5), (9, 9)):
        padded = {}
        for task, batch in data.items():
            sizes = {"input_ids": encoder, "attention_mask": encoder}
            padded[task] = {k: F.pad(v, (0, sizes.get(k, decoder) - v.shape[1])) for k, v in batch.items()}
        model, _ = calibrated(merged, teachers, {k: [v] for k, v in padded.items()}, cache=HiddenCache(0))
        results.append(model.state_dict())
    for name, value in results[0].items():
        torch.testing.assert_close(results[1][name], value, rtol=1e-3, atol=1e-4, msg=name)


def test_a_model_with_shared_blocks_runs_whole():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "embedding_size": 8, "num_attention_heads": 2, "intermediate_size": 24}
    config = t.AlbertConfig(**sizes, num_hidden_layers=3, vocab_size=40)
    model = t.AlbertForSequenceClassification(config).eval()
    structure = find_structure(model, rows("bert")["task0"])
    assert [stage.name for stage in structure.stages] == [WHOLE]
    assert all("albert_layers" in name for name in structure.skipped[REUSED])
    solved = [name for group in structure.groups[WHOLE] for name in group]
    assert "albert.encoder.embedding_hidden_mapping_in" in solved


class Residual(nn.Module):
    """A block that changes its input in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, hidden):
        return hidden.add_(self.linear(hidden))


class Stack(nn.Module):
    def __init__(self, block, functional=False):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.functional = functional

    def forward(self, values):
        hidden = F.linear(values, self.first.weight) if self.functional else self.first(values)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_a_block_that_changes_its_input_in_place_runs_whole():
    structure = find_structure(Stack(Residual), [torch.randn(2, 6)])
    assert not structure.lists and structure.notes
    assert len(structure.groups[WHOLE]) == 4


def test_a_weight_that_is_used_without_its_layer_is_an_error_that_names_it():
    with pytest.raises(InputError) as raised:
        find_structure(Stack(lambda: nn.Linear(6, 6), functional=True), [torch.randn(2, 6)])
    assert str(raised.value).startswith("first:")


def test_no_cache_of_keys_and_values_is_passed_to_blocks():
    model, _ = make("llama")
    model.config.use_cache = True
    structure = find_structure(model, rows("llama")["task0"])
    stream = RowStream(BlockModel(model, structure), [rows("llama")["task0"]], HiddenCache(2**40))
    stream.run_stage(structure.stages[0])
    leaves = [leaf for call in stream._calls[0].values() for leaf in call.leaves]
    assert not any(isinstance(leaf, t.Cache) for leaf in leaves)


def test_a_pooled_row_as_wide_as_the_text_is_long_is_not_masked():
    merged, _ = make("bert")
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    assert counted_positions(merged, {"attention_mask": mask}, torch.zeros(2, 3)) is None
    assert torch.equal(counted_positions(merged, {"attention_mask": mask}, torch.zeros(2, 3, 5)), mask.bool())
    assert torch.equal(counted_positions(merged, {"attention_mask": mask}, torch.zeros(6, 5)), mask.bool().flatten())
