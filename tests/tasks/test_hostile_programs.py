"""Programs that come with models (chat templates, regular expressions) are stopped when they do not end."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from gradmerge.checkpoints import lora
from gradmerge.errors import InputError
from gradmerge.tasks import load_model, load_task, text
from gradmerge.tasks.text import limited

from .making import tiny_bert_checkpoint, tiny_gpt2_checkpoint, write_jsonl

#: Patterns that try every way to cut a name into pieces before they give up. `regex` sees through the first, but not
#: through the second; `re` through neither.
LONG, ENDLESS = r"(\w+\.?)+!", r"((.|.)*)\1(?<!\w)"


def in_main(action: Callable[[], None]) -> BaseException | None:
    try:
        action()
    except BaseException as error:
        return error
    return None


def in_thread(action: Callable[[], None]) -> BaseException | None:
    found: list[BaseException | None] = []
    thread = threading.Thread(target=lambda: found.append(in_main(action)))
    thread.start()
    thread.join()
    return found[0]


def spin() -> None:
    while True:
        pass


@pytest.mark.parametrize("run", [in_main, in_thread])
def test_what_does_not_end_is_stopped_in_every_thread(run: Callable[..., BaseException | None]) -> None:
    def waits() -> None:
        with limited("the loop", 0.05):
            spin()

    error = run(waits)
    assert isinstance(error, InputError)


TEMPLATES = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a large power": "{{ 9 ** (9 ** 9) }}",
    "a doubled text": (
        "{% set n = namespace(x='aaaaaaaaaa') %}{% for a in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}"
    ),
    "a long text": "{{ 'a' * 32000001 }}",
    "a way out of the sandbox": "{{ messages.__class__.__mro__ }}{{ ''.__class__.__base__.__subclasses__() }}",
    "no template": "{% for %}",
}


@pytest.mark.parametrize("case", TEMPLATES)
def test_a_hostile_chat_template_is_stopped_and_named(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = case in ("loops", "a large power")
    monkeypatch.setattr(text, "TEMPLATE_SECONDS", 0.2 if endless else 20.0)
    monkeypatch.setattr(text, "TEMPLATE_MEMORY", 300_000_000)
    model = tiny_gpt2_checkpoint(tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATES[case])
    talk = [{"role": "user", "content": "what is it ?"}]
    data = write_jsonl(tmp_path / "a.jsonl", [{"messages": talk}])
    loaded = load_task(str(model), str(data), device="cpu")
    with pytest.raises(InputError, match="row 1"):
        next(loaded.batches(1))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter on a base whose modules include some with long names."""
    base = tiny_bert_checkpoint(tmp_path / "base")
    inner = AutoModelForSequenceClassification.from_pretrained(base)
    settings = LoraConfig(
        task_type="SEQ_CLS",
        r=2,
        target_modules=r".*layer\.[01]\.attention.*(query|value)",
        exclude_modules=r".*\.1\..*value",
        rank_pattern={r"0.*query": 3},
        alpha_pattern={r"layer\.\d+\.attention\.self\.query": 5, "value": 7},
    )
    torch.manual_seed(0)
    tuned = get_peft_model(inner, settings)
    for name, parameter in tuned.named_parameters():
        if "lora" in name:
            parameter.data.normal_()
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def change(adapter: Path, **values: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_patterns_of_an_adapter_mean_what_they_mean_to_peft(adapter: Path) -> None:
    inner = AutoModelForSequenceClassification.from_pretrained(adapter.parent / "base")
    expected = PeftModel.from_pretrained(inner, str(adapter)).merge_and_unload().state_dict()
    assert len([name for name in load_file(adapter / "adapter_model.safetensors") if "lora_A" in name]) == 3
    got = load_model(str(adapter), device="cpu")[0].state_dict()
    assert expected.keys() == got.keys()
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules", "rank_pattern", "alpha_pattern"])
def test_a_pattern_that_does_not_end_is_refused_before_peft_sees_it(
    adapter: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lora, "PATTERN_SECONDS", 0.05)
    change(adapter, **{key: {ENDLESS: 8} if key.endswith("_pattern") else ENDLESS})
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        load_model(str(adapter), device="cpu")


@pytest.mark.parametrize(
    "values",
    [
        {"modules_to_save": ["(a|a)*!"]},
        {"layers_pattern": "(a|a)*!", "layers_to_transform": [0], "target_modules": ["query"]},
        {"target_modules": "nothing"},
        {"target_modules": LONG},
        {"target_modules": "("},
        {"alpha_pattern": [1]},
    ],
)
def test_what_peft_would_take_for_a_pattern_is_checked(adapter: Path, values: dict[str, Any]) -> None:
    change(adapter, **values)
    with pytest.raises(InputError, match=r"adapter_config\.json"):
        load_model(str(adapter), device="cpu")
