"""AdamW's passes: what their gradients are, and that they go on from where they were."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    T5Config,
    T5ForConditionalGeneration,
)

from gradmerge.refinement.adamw import MOMENTS, TRIALS, _Passes, _search, adamw
from gradmerge.refinement.filling import Filling
from gradmerge.refinement.newton import Penalty, Progressed
from gradmerge.refinement.owners import DataOwner
from gradmerge.refinement.rounds import Refinement

from .making import batches, classes, perceptron


def owner_of(seed: int, name: str, rows: int = 60, size: int = 40, examples: int | None = None) -> DataOwner:
    data = batches(classes(rows, seed), size)
    return DataOwner(name, data, data, examples=examples)


class Averaging(nn.Module):
    """Tokens in, logits out; batches of other lengths cannot be joined."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(9, 4).double(), nn.Linear(4, 3).double()

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.words(ids).mean(1))
        return out


@pytest.mark.parametrize("kind", ["one shape", "other shapes"])
def test_the_gradients_of_a_pass_are_those_of_the_mean_loss_of_an_example(kind: str) -> None:
    """Σ_t (N_t/n_t) Σ_i ℓ_i and the penalty, divided by Σ N_t, whether tasks can be computed together or not."""
    if kind == "one shape":
        model: nn.Module = perceptron()
        data = [classes(70, 1), classes(45, 2)]
    else:
        model, ids = Averaging(), torch.randint(0, 9, (115, 6), generator=torch.Generator().manual_seed(1))
        data = [(ids[:70, :4], ids[:70, 0] % 3), (ids[70:], ids[70:, 1] % 3)]
    counts = [70, 450]
    owners = [DataOwner(str(n), batches(one, 30), [], examples=n) for one, n in zip(data, counts, strict=True)]
    weights = {name: p.detach() for name, p in model.named_parameters()}
    penalty = Penalty({n: torch.full_like(p, 5.0) for n, p in weights.items()}, {n: p + 1 for n, p in weights.items()})
    passes = _Passes(model, owners, penalty, 0, Refinement(model, "adamw"), weights)
    steps = passes._steps(0)
    assert sorted((owner.name, row) for one in steps for owner, row in one) == sorted(
        (owner.name, row) for owner in owners for row in range(owner.rows)
    )
    assert all(len({owner.name for owner, _ in one}) == (2 if kind == "one shape" else 1) for one in steps)
    for one in steps:
        passes._differentiate(one, len(steps) / sum(counts))
    found = {name: p.grad / len(steps) for name, p in model.named_parameters()}
    model.zero_grad()
    total = sum(
        n / len(y) * nn.functional.cross_entropy(model(x), y, reduction="sum")
        for (x, y), n in zip(data, counts, strict=True)
    )
    for name, p in model.named_parameters():
        total = total + 2.5 * (p - penalty.base[name]).square().sum()
    (total / sum(counts)).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


def texts(kind: str, ids: Sequence[Sequence[int]], side: str) -> dict[str, Tensor]:
    """A batch, filled up to its longest text on one side."""
    longest = max(map(len, ids))

    def even(values: Sequence[int], filling: int) -> list[int]:
        added = [filling] * (longest - len(values))
        return [*added, *values] if side == "left" else [*values, *added]

    batch = {
        "input_ids": torch.tensor([even(text, 1) for text in ids]),
        "attention_mask": torch.tensor([even([1] * len(text), 0) for text in ids]),
    }
    if kind == "classes":
        return {**batch, "labels": torch.tensor([text[0] % 3 for text in ids])}
    if kind == "tokens":
        return {**batch, "labels": torch.tensor([even(text, -100) for text in ids])}
    answers = [text[: 1 + text[0] % 3] for text in ids]
    widest = max(map(len, answers))
    return {**batch, "labels": torch.tensor([[*one, *[-100] * (widest - len(one))] for one in answers])}


def language_model(kind: str) -> nn.Module:
    size: dict[str, Any] = {"vocab_size": 11, "pad_token_id": 1, "num_labels": 3}
    torch.manual_seed(0)
    if kind == "answers":
        small = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 1}
        model: nn.Module = T5ForConditionalGeneration(T5Config(**size, **small, dropout_rate=0.0))
    else:
        small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = LlamaConfig(**size, **small)
        model = (LlamaForSequenceClassification if kind == "classes" else LlamaForCausalLM)(config)
    return model.double().eval()


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["classes", "tokens", "answers"])
def test_texts_of_other_lengths_are_one_batch_with_the_gradient_of_each_in_its_own(kind: str, side: str) -> None:
    """Of one task and of another, whose texts are longer."""
    order = torch.Generator().manual_seed(3)
    lengths = [torch.randint(*bounds, (40,), generator=order).tolist() for bounds in ((3, 9), (7, 13))]
    model, given, owners = language_model(kind), [], []
    for number, own in enumerate(lengths):
        ids = [torch.randint(2, 11, (length,), generator=order).tolist() for length in own]
        given.append([texts(kind, ids[first : first + 8], side) for first in range(0, 40, 8)])
        owners.append(DataOwner("ab"[number], given[-1], [], examples=(40, 80)[number]))
    passes = _Passes(model, owners, None, 0, Refinement(model, "adamw"), {})
    assert all(len({owner.name for owner, _ in one}) == 2 for one in passes._steps(0))
    chosen = [(number, row) for row in range(1, 40, 3) for number in (0, 1)]
    seen: list[int] = []
    watch = model.register_forward_pre_hook(
        lambda _, args, inputs: seen.append(len(inputs["input_ids"])), with_kwargs=True
    )
    passes._differentiate([(owners[number], row) for number, row in chosen], 1.0)
    watch.remove()
    assert seen[-1] == len(chosen) and all(count == 1 for count in seen[:-1])  # rows that ask whether the model minds
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for number, row in chosen:
        alone = {name: value[row % 8 : row % 8 + 1] for name, value in given[number][row // 8].items()}
        labels = alone.pop("labels")
        logits = model(**alone, **({"labels": labels} if kind == "answers" else {})).logits
        if kind == "tokens":
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
        ((1, 2)[number] * loss).backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


class Counting(nn.Module):
    """Minds how long its texts are, though the rest is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = language_model("classes")
        self.config = self.inner.config

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs).logits * inputs["input_ids"].shape[1]


def test_texts_are_not_filled_up_where_the_model_minds_or_names_no_token_that_it_has() -> None:
    own = [texts("classes", [[3] * length] * 4, "right") for length in (3, 5, 4)]

    def lengths(filling: Filling, model: nn.Module) -> list[int]:
        return [one["input_ids"].shape[1] for one in filling(model, own)]

    assert lengths(Filling(), language_model("classes")) == [5, 5, 5]
    minded = Filling()
    assert lengths(minded, Counting()) == lengths(minded, Counting()) == [3, 5, 4]
    unnamed: Any = language_model("classes")
    unnamed.config.pad_token_id = -1
    assert lengths(Filling(), unnamed) == [3, 5, 4]
    silent: Any = language_model("classes")
    nn.init.zeros_(silent.score.weight)  # what it minds cannot be seen
    assert lengths(Filling(), silent) == [3, 5, 4]


def test_texts_are_filled_up_to_at_most_twice_their_length() -> None:
    own = [texts("classes", [[3] * length], "right") for length in (4, 9, 2, 1, 5)]
    assert [one["attention_mask"].shape[1] for one in Filling()(language_model("classes"), own)] == [4, 9, 4, 1, 9]


def test_numbers_in_the_place_of_labels_are_not_filled_up() -> None:
    own = [texts("classes", [[3] * length], "right") for length in (4, 5)]
    own = [{**one, "labels": torch.zeros(1, width)} for one, width in zip(own, (2, 3), strict=True)]
    assert all(one is given for one, given in zip(Filling()(language_model("classes"), own), own, strict=True))


@pytest.mark.parametrize("more", [0, 1])
def test_texts_with_other_inputs_are_not_filled_up(more: int) -> None:
    own = [texts("classes", [[3] * length], "right") for length in (4, 5)]
    own[more]["token_type_ids"] = torch.zeros_like(own[more]["input_ids"])
    assert all(one is given for one, given in zip(Filling()(language_model("classes"), own), own, strict=True))


def test_a_step_of_a_model_that_minds_has_the_gradient_of_each_length_in_its_own_batch() -> None:
    given = [texts("classes", [[3 + n] * n] * 4, "right") for n in (3, 5)]
    owners, model = [DataOwner(str(n), [one], []) for n, one in enumerate(given)], Counting()
    passes = _Passes(model, owners, None, 0, Refinement(model, "adamw"), {})
    passes._differentiate([(owner, row) for owner in owners for row in range(4)], 1.0)
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for one in given:
        inputs = {name: value for name, value in one.items() if name != "labels"}
        nn.functional.cross_entropy(model(**inputs), one["labels"], reduction="sum").backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name], p.grad)


@pytest.mark.parametrize("model", ["minds", "does not"])
def test_rows_of_tasks_are_mixed_where_the_model_can_take_them_together(model: str) -> None:
    owners = [DataOwner(name, [texts("classes", [[3] * n] * 40, "right")], []) for name, n in (("a", 3), ("b", 9))]
    taken = language_model("classes") if model == "does not" else Counting()
    steps = _Passes(taken, owners, None, 0, Refinement(taken, "adamw"), {})._steps(0)
    assert {len({owner.name for owner, _ in one}) for one in steps} == {2 if model == "does not" else 1}


@pytest.mark.parametrize("killed", [1, 2, 4])
def test_it_goes_on_from_any_pass_to_the_same_bits(killed: int) -> None:
    owners = [owner_of(1, "a"), owner_of(2, "b")]
    whole, part = perceptron(), perceptron()
    start = {name: p.detach().clone() for name, p in part.named_parameters()}
    done = adamw(whole, owners, rounds=8)
    assert len(done.rounds) > 5 and done.rounds[1].judged < done.rounds[0].judged
    kept: list[Progressed] = []

    def stop(state: Progressed) -> None:
        if len(state.done.rounds) > killed:
            weights = {name: p.detach().clone() for name, p in part.named_parameters()}
            last = {name: value.clone() for name, value in state.last.items()}
            rounds = copy.deepcopy(state.done.rounds)
            kept.append(Progressed(Refinement(part, "adamw", rounds, passes=state.done.passes.copy()), last, weights))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        adamw(part, owners, rounds=8, told=stop)
    (state,) = kept
    assert (len(state.last) > 0) is (killed > 1) and all(name.split("/")[0] in MOMENTS for name in state.last)
    with torch.no_grad():
        for name, p in part.named_parameters():
            p.copy_(state.weights[name])
    resumed = adamw(part, owners, rounds=8, start=start, so_far=state)
    assert [one.judged for one in resumed.rounds] == [one.judged for one in done.rounds]
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), part.parameters(), strict=True))


@pytest.mark.parametrize("up", [[], [2e-4, 4e-4]])
def test_rates_go_down_while_none_is_better_than_the_start(up: list[float]) -> None:
    """Even if steps up were better than the first."""
    tried: list[float] = []

    def change(rate: float) -> float:
        tried.append(rate)
        if rate < 2e-5:
            return -0.1
        return abs(rate - (up or [1e-4])[0])

    _search(change)
    assert tried == pytest.approx([1e-4, *(up or [2e-4]), 5e-5, 2.5e-5, 1.25e-5, 6.25e-6])
    tried.clear()
    _search(lambda rate: tried.append(rate) or 1.0)  # type: ignore[func-returns-value]
    assert len(tried) == TRIALS


@pytest.mark.parametrize("kind", ["learned", "noise"])
def test_a_fall_within_its_error_does_not_count(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tasks with a few rows to judge by: a fall by chance is not taken for a gain, a true one is."""
    taken = {0.0: 0, 1.0: 0}
    for doubt, seed in itertools.product(taken, range(8)):
        monkeypatch.setattr("gradmerge.refinement.adamw.DOUBT", doubt)
        model, owners = perceptron(), []
        for number in (0, 1):
            x, y = classes(60, 2 * seed + number)
            if kind == "noise":
                y[48:] = torch.randint(0, 3, (12,), generator=torch.Generator().manual_seed(2 * seed + number))
            owners.append(DataOwner("ab"[number], [(x[:48], y[:48])], [(x[48:], y[48:])]))
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        before = [owner.row_losses(model, held=True) for owner in owners]
        done = adamw(model, owners, rounds=2)
        changes = [owner.row_losses(model, held=True) - own for owner, own in zip(owners, before, strict=True)]
        if done.improved:
            gained = -sum(float(change.mean()) for change in changes)
            squares = sum(float((change - change.mean()).square().sum()) / 11 / 12 for change in changes)
            assert gained > doubt * squares**0.5
            assert done.rounds[0].judged - done.rounds[-1].judged == pytest.approx(gained)
        else:
            assert "by more than a standard error" in done.stopped
            assert all(torch.equal(p, start[name]) for name, p in model.named_parameters())
        taken[doubt] += done.improved
    assert taken[1.0] == taken[0.0] == 8 if kind == "learned" else taken[1.0] < taken[0.0], taken


@pytest.mark.parametrize(("tasks", "counts"), [(1, False), (4, True)])
def test_a_single_row_cannot_say_that_the_loss_fell(tasks: int, counts: bool) -> None:
    """Its error is not known; those of several tasks that agree can."""
    x, y = classes(60, 3)
    owners = [DataOwner(str(n), [(x, y)], [(x[n : n + 1], y[n : n + 1])]) for n in range(tasks)]
    assert adamw(perceptron(), owners, rounds=2).improved is counts
