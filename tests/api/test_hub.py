"""Pushing to the Hub: files that are sent or not, changes, and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.cli.app import app

from ..making import near, random_curvature, random_state, write_model
from .hub_stand_in import TOKEN, Hub, stand_in

CONFIG = {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with stand_in() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        yield found


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A merge with curvature, in shards, and beside it what should stay here."""
    base = random_state(0)
    for place, name in enumerate(("base", "a", "b")):
        state = near(base, place) if place else base
        folder = write_model(tmp_path / name, state, config=CONFIG)
        (folder / "README.md").write_text("---\nlicense: apache-2.0\nbase_model: org/origin\n---\n# A model\n")
        random_curvature(place, state).save(folder / "curvature")
    recipe = {
        "method": "gradient-matching",
        "base": str(tmp_path / "base"),
        "models": [str(tmp_path / name) for name in "ab"],
        "output": {"curvature": True, "shard_size": 2000},
    }
    gm.merge(recipe, tmp_path / "out")
    for name in (".env", "optimizer.pt", "training_args.bin", "data.jsonl", "id_rsa", "run.py"):
        (tmp_path / "out" / name).write_text("mine")
    return tmp_path / "out"


def local(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


SECRETS = {".env", "optimizer.pt", "training_args.bin", "data.jsonl", "id_rsa", "run.py"}


def test_weights_card_record_and_curvature_are_sent_and_nothing_else(out: Path, hub: Hub) -> None:
    before = local(out)
    done = gm.push(out, "me/merged")
    there = hub.repos["me/merged"]["main"]
    assert there.keys() - {".gitattributes"} == before.keys() - SECRETS == set(done.files)
    assert any("-00001-of-" in name for name in there) and "curvature/curvature.safetensors" in str(there.keys())
    changed = {"README.md", "gradmerge.json"}
    for name in before.keys() - SECRETS - changed:
        assert there[name] == before[name], name
    assert set(done.left_out) == SECRETS and done.url is not None and done.url.startswith(hub.endpoint)
    assert done.files == {name: len(there[name]) for name in done.files}
    # The card loads the model from the Hub, and is otherwise as it is here; the record knows the id.
    card = there["README.md"].decode()
    assert card == before["README.md"].decode().replace('name = "out"', 'name = "me/merged"')
    assert 'name = "me/merged"' in card
    record = json.loads(there["gradmerge.json"])
    assert record["hub_id"] == "me/merged" == json.loads((out / "gradmerge.json").read_text())["hub_id"]
    # No path of this machine, and no token, is in anything that was sent or written.
    for content in (*there.values(), *local(out).values()):
        assert TOKEN.encode() not in content
    assert str(out.parent).encode() not in b"".join(there.values())
    assert [one["source"] for one in record["inputs"] if one["role"] != "curvature"][:3] == ["base", "a", "b"]
    assert len(hub.commits) == 1


def test_a_second_push_sends_only_what_has_changed(out: Path, hub: Hub) -> None:
    hub.failing = {"/commit/": (500, "busy")}
    with pytest.raises(gm.MachineError):
        gm.push(out, "me/merged")
    assert "hub_id" not in json.loads((out / "gradmerge.json").read_text())
    sent = len(hub.uploads())
    assert sent == sum(name.endswith(".safetensors") for name in local(out)) and not hub.commits
    hub.failing = {}
    gm.push(out, "me/merged")
    gm.push(out, "me/merged")
    assert len(hub.commits) == 1 and len(hub.uploads()) == sent
    (out / "README.md").write_text((out / "README.md").read_text() + "\nMore words.\n")
    gm.push(out, "me/merged")
    assert hub.repos["me/merged"]["main"]["README.md"].decode().endswith("More words.\n")
    assert len(hub.commits) == 2 and len(hub.uploads()) == sent


def test_earlier_shards_are_removed_and_other_files_of_the_repository_stay(out: Path, hub: Hub) -> None:
    files = hub.make("me/merged")
    stale = ["model.safetensors", "model-00001-of-00002.safetensors", "curvature/curvature.safetensors"]
    files |= dict.fromkeys([*stale, "notes.md", "other/model.safetensors"], b"old")
    done = gm.push(out, "me/merged")
    gone = [name for name in stale if name not in done.files]
    assert gone and "notes.md" in files and "other/model.safetensors" in files and not files.keys() & set(gone)


def test_a_dry_run_does_not_use_the_network(out: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    before = local(out)
    plan = gm.push(out, "me/merged", dry_run=True)
    assert not hub.log and local(out) == before
    assert plan.url is None and set(plan.left_out) == SECRETS
    assert not plan.lacks and plan.nbytes == sum(plan.files.values())
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert gm.push(out, "me/merged").files == plan.files


def test_curvature_goes_into_the_folder_where_merges_look_for_it(tmp_path: Path, hub: Hub) -> None:
    state = random_state(0)
    random_curvature(1, state).save(tmp_path / "c")
    done = gm.push(tmp_path / "c", "me/yelp")
    there = hub.repos["me/yelp"]["main"]
    assert there["curvature/curvature.safetensors"] == (tmp_path / "c/curvature.safetensors").read_bytes()
    # A repository of its own shows the card on its page; that of a model keeps the model's.
    assert there["README.md"] == there["curvature/README.md"] == (tmp_path / "c/README.md").read_bytes()
    assert done.kind == "curvature" and not done.lacks
    hub.make("me/model")["README.md"] = b"# The model\n"
    gm.push(tmp_path / "c", "me/model")
    assert hub.repos["me/model"]["main"]["README.md"] == b"# The model\n"


def test_a_branch_is_made_and_a_private_repository_is_private(out: Path, hub: Hub) -> None:
    gm.push(out, "me/merged", private=True, revision="v2")
    assert hub.private == {"me/merged"} and hub.repos["me/merged"]["main"].keys() == {".gitattributes"}
    assert "README.md" in hub.repos["me/merged"]["v2"]
    gm.push(out, "me/merged", revision="v2")
    hub.make("me/public")
    with pytest.raises(gm.InputError, match="me/public"):
        gm.push(out, "me/public", private=True)
    assert hub.repos["me/public"]["main"].keys() == {".gitattributes"}


def test_an_adapter_is_sent_with_the_id_of_its_base(tmp_path: Path, hub: Hub) -> None:
    folder = tmp_path / "lora"
    folder.mkdir()
    save_file(random_state(0, {"base_model.model.l.lora_A.weight": (2, 4)}), folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "base_model_name_or_path": "../base", "r": 2}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "README.md").write_text("---\nbase_model: [org/base]\nlicense: mit\n---\n# L\n")
    done = gm.push(folder, "me/lora")
    sent = json.loads(hub.repos["me/lora"]["main"]["adapter_config.json"])
    assert sent == config | {"base_model_name_or_path": "org/base"} and done.kind == "adapter"
    assert json.loads((folder / "adapter_config.json").read_text()) == config
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# L\n")
    assert gm.push(folder, "me/lora", dry_run=True).notes


@pytest.mark.parametrize(("status", "kind"), [(403, gm.InputError), (400, gm.InputError), (409, gm.MachineError)])
def test_errors_of_the_hub_do_not_show_the_token(status: int, kind: type[Exception], out: Path, hub: Hub) -> None:
    hub.failing = {"/commit/": (status, f"said with {TOKEN}")}
    with pytest.raises(kind, match=str(status)) as raised:
        gm.push(out, "me/merged")
    assert TOKEN not in str(raised.value) and "\n" not in str(raised.value)


def test_invalid_folders_and_names_are_refused_before_anything_is_sent(
    out: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, repo: str) -> None:
        with pytest.raises(gm.InputError):
            gm.push(folder, repo)

    for repo in ("merged", "a/b/c", "a/b@main"):
        refused(out, repo)
    refused(tmp_path / "none", "me/m")
    (tmp_path / "half.gradmerge-partial").mkdir()
    refused(tmp_path / "half.gradmerge-partial", "me/m")
    (out / "gradmerge.journal").touch()
    refused(out, "me/m")
    (out / "gradmerge.journal").unlink()
    shard = next(out.glob("model-00002*"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-4])
    refused(out, "me/m")
    shard.write_bytes(whole)
    card = (out / "README.md").read_text()
    (out / "README.md").unlink()
    refused(out, "me/m")
    for front in ("a: [", "- 1", "model-index: 5"):
        (out / "README.md").write_text(f"---\n{front}\n---\n# M\n")
        refused(out, "me/m")
    (out / "README.md").write_text(card)
    assert not hub.log
    monkeypatch.delenv("HF_TOKEN")
    refused(out, "me/m")
    assert not hub.log
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    refused(out, "me/m")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    refused(out, "others/m")
    (out / "README.md").write_text(card.replace("license: apache-2.0", "license: nonsense"))
    refused(out, "me/m")
    assert not hub.commits


def test_the_command_line(out: Path, hub: Hub) -> None:
    for failing, status in (({}, 0), ({"/api/repos/create": (500, "busy")}, 1)):
        hub.failing = failing
        result = CliRunner().invoke(app, ["push", str(out), "me/merged", "--json"])
        assert result.exit_code == status and TOKEN not in result.output and "Traceback" not in result.output


def test_the_next_merge_names_the_pushed_model(out: Path, hub: Hub, tmp_path: Path) -> None:
    gm.push(out, "me/merged")
    gm.merge({"method": "average", "models": [str(out), str(tmp_path / "a")]}, tmp_path / "next")
    front = yaml.safe_load((tmp_path / "next/README.md").read_text().split("---\n")[1])
    assert front["base_model"] == ["me/merged", "org/origin"] and front["license"] == "apache-2.0"
