"""Whether checkpoints fit together: found out before any work, every difference in one message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gradmerge as gm
from gradmerge.checkpoints import Checkpoint, compare
from gradmerge.errors import InputError
from tests.making import assert_close, near, random_curvature, random_state, read_model, write_model

State = dict[str, Tensor]


def merge(tmp_path: Path, base: State, *tuned: State, method: str = "average", **recipe: Any) -> gm.MergeResult:
    write_model(tmp_path / "base", base)
    folders = [write_model(tmp_path / f"tuned{i}", state, i + 1) for i, state in enumerate(tuned)]
    recipe = {"method": method, "base": str(tmp_path / "base"), "models": [str(f) for f in folders], **recipe}
    return gm.merge(recipe, tmp_path / "out")


def refusal(tmp_path: Path, base: State, *tuned: State, **recipe: Any) -> str:
    """The message of a merge that must be refused, with nothing written; paths in it are shortened."""
    with pytest.raises(InputError) as error:
        merge(tmp_path, base, *tuned, **recipe)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.gradmerge-partial").exists()
    return str(error.value).replace(f"{tmp_path}/", "")


def without(state: State, *names: str) -> State:
    return {name: value for name, value in state.items() if name not in names}


def in_memory(label: str, state: State, config: dict[str, Any] | None = None) -> Checkpoint:
    return Checkpoint(label, memory=state, config=config)


BASE = random_state(0)
HEADS = {"encoder.weight": (4, 4), "classifier.weight": (3, 4), "classifier.bias": (3,)}


def test_extra_tensors_are_named_and_can_be_excluded(tmp_path: Path) -> None:
    tuned = near(BASE, 1) | {"head.weight": torch.ones(2, 2), "head.bias": torch.ones(2)}
    message = refusal(tmp_path, BASE, tuned)
    assert "head.weight" in message and "head.bias" in message
    merge(tmp_path, BASE, tuned, exclude=["head.*"])
    assert_close(read_model(tmp_path / "out"), without(tuned, "head.weight", "head.bias"), 0)


def test_heads_of_other_shapes_are_refused_unless_they_are_excluded(tmp_path: Path) -> None:
    base, tuned = (
        random_state(0, HEADS),
        random_state(1, HEADS | {"classifier.weight": (7, 4), "classifier.bias": (7,)}),
    )
    message = refusal(tmp_path, base, tuned)
    assert "classifier.weight: [3, 4] in base, [7, 4] in tuned0" in message
    assert "classifier.bias: [3] in base, [7] in tuned0" in message
    merge(tmp_path, base, tuned, exclude=["classifier.*"])
    got = read_model(tmp_path / "out")
    assert_close(got, base | {"encoder.weight": tuned["encoder.weight"]}, 0)


def test_a_shape_with_the_same_number_of_entries_is_another_shape(tmp_path: Path) -> None:
    tuned = near(BASE, 1)
    tuned["layers.0.linear.weight"] = tuned["layers.0.linear.weight"].T.contiguous()
    assert "layers.0.linear.weight: [16, 8] in base, [8, 16] in tuned0" in refusal(tmp_path, BASE, tuned)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "transformer.wte.weight", "bert.embeddings.word_embeddings.weight"]
)
def test_another_vocabulary_is_called_that(name: str, tmp_path: Path) -> None:
    shapes = {name: (50, 8), "lm_head.weight": (50, 8), "body.weight": (8, 8)}
    longer = shapes | {name: (52, 8), "lm_head.weight": (52, 8)}
    message = refusal(tmp_path, random_state(0, shapes), random_state(1, longer))
    assert "vocabulary" in message and message.count("•") == 1
    assert f"{name}: [50, 8] in base, [52, 8] in tuned0" in message
    assert "lm_head.weight: [50, 8] in base, [52, 8] in tuned0" in message


def test_embeddings_of_another_width_are_another_shape_and_not_another_vocabulary(tmp_path: Path) -> None:
    shapes = {"model.embed_tokens.weight": (50, 8)}
    message = refusal(tmp_path, random_state(0, shapes), random_state(1, {"model.embed_tokens.weight": (50, 12)}))
    assert "vocabulary" not in message


@pytest.mark.parametrize("longer", ["base", "tuned0"])
def test_names_that_differ_by_a_leading_part_are_explained(longer: str, tmp_path: Path) -> None:
    bare = random_state(0)
    headed = {f"model.{name}": value for name, value in bare.items()} | {"head.weight": torch.ones(2, 2)}
    base, tuned = (headed, bare) if longer == "base" else (bare, headed)
    message = refusal(tmp_path, base, tuned)
    line = '{"": "model."}' if longer == "base" else '{"model.": ""}'
    assert f"rename: {line}" in message


def test_every_difference_of_every_model_is_in_one_message(tmp_path: Path) -> None:
    shapes = {
        "model.embed_tokens.weight": (50, 8),
        "a.weight": (4, 4),
        "b.weight": (4, 4),
        "c.weight": (4, 4),
        "d.weight": (4,),
    }
    base = random_state(0, shapes)
    first = random_state(1, shapes | {"model.embed_tokens.weight": (51, 8), "b.weight": (4, 5), "extra.weight": (2,)})
    first = without(first, "a.weight") | {"d.weight": torch.arange(4)}
    second = random_state(2, shapes | {"c.weight": (1, 4)})
    curvature = random_curvature(3, without(base, "d.weight"))
    curvature.save(tmp_path / "curvature")
    message = refusal(
        tmp_path,
        base,
        first,
        second,
        method="fisher-averaging",
        models=[
            {"model": str(tmp_path / "tuned0"), "curvature": str(tmp_path / "curvature")},
            {"model": str(tmp_path / "tuned1"), "curvature": {"identity": 1.0}},
        ],
    )
    for part in (
        "model.embed_tokens.weight: [50, 8] in base, [51, 8] in tuned0",
        "a.weight",
        "extra.weight",
        "b.weight: [4, 4] in base, [4, 5] in tuned0",
        "d.weight: float32 [4] in base, I64 [4] in tuned0",
        "c.weight: [4, 4] in base, [1, 4] in tuned1",
    ):
        assert part in message, message
    assert message.count("•") == 7


def test_long_lists_are_cut_with_a_count(tmp_path: Path) -> None:
    shapes = {f"layers.{i}.weight": (2, 2) for i in range(30)}
    message = refusal(tmp_path, random_state(0, shapes), random_state(1, {"layers.0.weight": (2, 2)}))
    assert "29" in message and len(message.splitlines()) < 15


OLD_BUFFERS = {
    "embeddings.position_ids": torch.arange(4),
    "h.0.attn.bias": torch.ones(1, 1, 4, 4),
    "h.0.attn.masked_bias": torch.tensor(-1e4),
    "layers.0.self_attn.rotary_emb.inv_freq": torch.tensor([1.0, 0.1]),
    "bn.num_batches_tracked": torch.tensor(5),
}


def test_constants_that_only_older_checkpoints_store_stand_in_nobodys_way(tmp_path: Path) -> None:
    tuned = near(BASE, 1)
    merge(tmp_path / "new-base", BASE, tuned | OLD_BUFFERS)
    assert_close(read_model(tmp_path / "new-base/out"), tuned, 0)
    merge(tmp_path / "old-base", BASE | OLD_BUFFERS, tuned)
    got = read_model(tmp_path / "old-base/out")
    assert_close(got, tuned | OLD_BUFFERS, 0)


def test_biases_of_attention_layers_are_weights_and_not_constants(tmp_path: Path) -> None:
    shapes = {
        "h.0.attn.c_attn.bias": (6,),
        "h.0.attn.c_proj.bias": (2,),
        "layer.0.attention.self.query.bias": (4,),
        "layer.0.attention.output.dense.bias": (4,),
        "layer.0.self_attn.q_proj.bias": (4,),
    }
    base = random_state(0, shapes)
    tuned = near(base, 1)
    result = merge(tmp_path, base, tuned)
    assert result.merged == len(shapes)
    assert_close(read_model(tmp_path / "out"), tuned, 0)


def write_tokenizer(folder: Path, vocabulary: dict[str, int], **more: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, **more}))


def test_a_tokenizer_with_other_rows_is_a_warning(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base", {"a": 0, "b": 1})
    write_tokenizer(tmp_path / "tuned0", {"a": 1, "b": 0})
    write_tokenizer(tmp_path / "tuned1", {"a": 0, "b": 1}, padding={"strategy": "longest"})
    notes = merge(tmp_path, BASE, near(BASE, 1), near(BASE, 2)).notes
    (found,) = [note for note in notes if "tokenizer" in note]
    assert found.is_warning and found.data == {"moved": 2} and "tuned0" in found
    assert json.loads((tmp_path / "out/tokenizer.json").read_text())["model"]["vocab"] == {"a": 0, "b": 1}


@pytest.mark.parametrize("text", ["", "[]", '{"model": 3}', '{"model": {}}', "\xff\xfe", "[" * 5000])
def test_a_tokenizer_that_cannot_be_read_does_not_stop_a_merge(text: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "base", {"a": 0})
    (tmp_path / "tuned0").mkdir()
    (tmp_path / "tuned0/tokenizer.json").write_text(text, "latin-1")
    tuned = near(BASE, 1)
    merge(tmp_path, BASE, tuned)
    assert_close(read_model(tmp_path / "out"), tuned, 0)


def test_an_include_pattern_that_fits_nothing_names_the_nearest_tensor(tmp_path: Path) -> None:
    message = refusal(tmp_path, BASE, near(BASE, 1), include=["clasifier.weight"])
    assert "'clasifier.weight'" in message and "'classifier.weight'" in message


def test_an_exclude_pattern_that_fits_nothing_is_a_note(tmp_path: Path) -> None:
    notes = merge(tmp_path, BASE, near(BASE, 1), exclude=["clasifier.*"]).notes
    assert len(notes) == 1 and "'clasifier.*'" in notes[0]


def test_excluding_everything_leaves_nothing_to_merge(tmp_path: Path) -> None:
    refusal(tmp_path, BASE, near(BASE, 1), exclude=["*"])


def test_types_that_cannot_be_merged_are_refused_unless_they_are_excluded(tmp_path: Path) -> None:
    small = {"quantised.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}
    message = refusal(tmp_path, BASE | small, near(BASE, 1) | small)
    assert "quantised.weight" in message and "F8_E4M3" in message
    merge(tmp_path, BASE | small, near(BASE, 1) | small, exclude=["quantised.*"])
    assert read_model(tmp_path / "out")["quantised.weight"].dtype == torch.float8_e4m3fn


def test_a_weight_that_only_the_tuned_model_stores_in_eight_bits_is_refused(tmp_path: Path) -> None:
    tuned = near(BASE, 1)
    tuned["classifier.weight"] = tuned["classifier.weight"].to(torch.float8_e5m2)
    message = refusal(tmp_path, BASE, tuned)
    assert "classifier.weight: float32 [3, 8] in base, F8_E5M2 [3, 8] in tuned0" in message


def test_without_a_base_every_model_is_compared_with_the_first(tmp_path: Path) -> None:
    one = write_model(tmp_path / "one", BASE)
    two = write_model(tmp_path / "two", without(near(BASE, 1), "embed.weight"))
    three = write_model(tmp_path / "three", near(BASE, 2) | {"more": torch.ones(1)})
    with pytest.raises(InputError) as error:
        gm.merge({"method": "average", "models": [str(one), str(two), str(three)]}, tmp_path / "out")
    message = str(error.value).replace(f"{tmp_path}/", "")
    assert "embed.weight" in message and "more" in message and message.count("•") == 2


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@pytest.mark.parametrize("config", [{}, {"tie_word_embeddings": True}, {"text_config": {"tie_word_embeddings": True}}])
def test_a_head_that_is_tied_stands_under_its_embedding(config: dict[str, Any]) -> None:
    base = random_state(0, {EMBEDDING: (5, 2), HEAD: (5, 2)})
    result = compare(in_memory("base", base), [in_memory("tuned", without(base, HEAD), config)])
    assert not result.problems
    assert result.aliases == [{HEAD: EMBEDDING}]
    assert len(result.notes) == 1 and f"{HEAD} = {EMBEDDING}" in result.notes[0]


@pytest.mark.parametrize("config", [{"tie_word_embeddings": False}, {"text_config": {"tie_word_embeddings": False}}])
def test_a_head_that_the_config_calls_untied_is_missing(config: dict[str, Any]) -> None:
    base = random_state(0, {EMBEDDING: (5, 2), HEAD: (5, 2)})
    result = compare(in_memory("base", base), [in_memory("tuned", without(base, HEAD), config)])
    assert result.aliases == [{}]
    assert len(result.problems) == 1 and HEAD in result.problems[0]


@pytest.mark.parametrize("change", ["one entry", "the type"])
def test_only_an_exact_copy_of_the_embedding_is_a_tied_head(change: str) -> None:
    base = random_state(0, {EMBEDDING: (500, 600)})
    base[EMBEDDING][499, 599] = 0.0
    head = base[EMBEDDING].clone()
    tuned = base | {HEAD: head}
    assert not compare(in_memory("base", base), [in_memory("tuned", tuned)]).problems
    if change == "one entry":
        head[499, 599] = 1e-30
    else:
        tuned[HEAD] = head.double()
    problems = compare(in_memory("base", base), [in_memory("tuned", tuned)]).problems
    assert len(problems) == 1 and HEAD in problems[0]
