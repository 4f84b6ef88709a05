"""Merges from and to URLs: the bytes of local ones, against a local S3 server and a stand-in of the Hub."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import yaml
from huggingface_hub import constants
from safetensors.torch import save_file
from typer.testing import CliRunner

import gradmerge as gm
from gradmerge.api.recipe_yaml import recipe_documents
from gradmerge.checkpoints import open as opening
from gradmerge.cli.app import app
from gradmerge.io import remote
from gradmerge.io.upload import UNFINISHED, Upload

from ..api.hub_stand_in import TOKEN, Hub, stand_in
from ..http_stand_in import web_server
from ..making import Stop, near, random_curvature, random_state, weight_bytes, write_model

MODELS = ("base", "a", "b")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bucket on a server of this machine, with the models of the folder ``here`` in it."""
    import logging

    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        fs = fsspec.filesystem("s3", skip_instance_cache=True)
        fs.mkdir("bucket")
        here = tmp_path_factory.mktemp("models")
        fill(here)
        fs.put(f"{here}/", "bucket/", recursive=True)
        fs.here = here
        yield fs
    server.stop()


def fill(here: Path) -> None:
    """Three models in shards, with curvature and a tokenizer, and an adapter."""
    base = random_state(0)
    for place, name in enumerate(MODELS):
        state = near(base, place) if place else base
        folder = write_model(here / name, state, shards=place + 1)
        random_curvature(place, state).save(folder / "curvature")
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        (folder / "notes.md").write_text("mine")
    (here / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["linear"]}
    (here / "lora/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../base"}))
    parts = {"lora_A.weight": (2, 8), "lora_B.weight": (16, 2)}
    names = {f"base_model.model.layers.0.linear.{part}": shape for part, shape in parts.items()}
    save_file(random_state(7, names), here / "lora/adapter_model.safetensors")


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    remote._copies.clear()


def recipe(root: object, method: str = "gradient-matching", **more: Any) -> dict[str, Any]:
    return {"method": method, "base": f"{root}/base", "models": [f"{root}/a", f"{root}/b"], **more}


def there(fs: Any, place: str) -> dict[str, bytes]:
    """Every file of a result at a URL but its record, as `weight_bytes` gives it for a folder."""
    fs.invalidate_cache()
    found = {name.removeprefix(f"{place}/"): fs.cat_file(name) for name in fs.find(place)}
    found.pop("gradmerge.json", None)
    return found


def same_but_for_places(got: dict[str, bytes], want: dict[str, bytes], here: object, root: str) -> None:
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].replace(root.encode(), str(here).encode()) == want[name], name


@pytest.mark.parametrize("case", ["gradient-matching", "ties", "adapter", "to an adapter"])
def test_a_merge_from_and_to_s3_has_the_bytes_of_a_local_one(case: str, s3: Any, tmp_path: Path) -> None:
    def made(root: object) -> dict[str, Any]:
        output = {"shard_size": 1000}
        if case == "gradient-matching":
            return recipe(root, output=output | {"curvature": True})
        if case == "ties":
            return recipe(root, "ties", output=output)
        if case == "adapter":  # whose base its own config names, beside it
            return {"method": "average", "models": [f"{root}/lora", f"{root}/a"], "output": output}
        return {"method": "task-arithmetic", "base": f"{root}/base", "models": [f"{root}/lora"]} | {
            "output": {"format": "adapter"}
        }

    here, out = tmp_path / f"out {case}", f"bucket/out {case}"
    gm.merge(made(s3.here), here)
    result = gm.merge(made("s3://bucket"), f"s3://{out}")
    assert str(result.output) == f"s3://{out}"
    got = there(s3, out)
    same_but_for_places(got, weight_bytes(here), s3.here, "s3://bucket")
    assert len([key for key in got if "safetensors" in key]) > (1 if "adapter" not in case else 0)
    record = json.loads(s3.cat_file(f"{out}/gradmerge.json"))
    local = json.loads((here / "gradmerge.json").read_text())
    for one, other in zip(record["inputs"], local["inputs"], strict=True):
        assert one["source"].replace("s3://bucket", str(s3.here)) == other["source"]
        assert one["files"] == other["files"]
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert gm.merge(made("s3://bucket"), f"s3://{out}", resume=True).already_done


def test_what_is_there_is_replaced_only_with_force_and_only_if_it_is_ours(s3: Any) -> None:
    average = {"method": "average", "models": ["s3://bucket/a", "s3://bucket/b"]}
    s3.pipe_file("bucket/mine/data.csv", b"x")
    gm.merge(recipe("s3://bucket", output={"shard_size": 1000}), "s3://bucket/place")
    before = there(s3, "bucket/place")
    assert len(before) > 4
    for out, force in (("place", False), ("mine", True), ("a", True), ("a/inside", False)):
        with pytest.raises(gm.InputError, match=f"s3://bucket/{out}"):
            gm.merge(average, f"s3://bucket/{out}", force=force)
    assert there(s3, "bucket/place") == before and s3.cat_file("bucket/mine/data.csv") == b"x"
    gm.merge(average, "s3://bucket/place", force=True)
    after = there(s3, "bucket/place")
    assert "model.safetensors" in after and not any("-of-" in name for name in after) and UNFINISHED not in after
    s3.rm_file("bucket/place/gradmerge.json")
    s3.pipe_file(f"bucket/place/{UNFINISHED}", b"")
    with pytest.raises(gm.InputError, match="s3://bucket/place"):
        gm.merge(average, "s3://bucket/place")
    gm.merge(average, "s3://bucket/place", force=True)
    assert there(s3, "bucket/place") == after


def test_a_merge_that_stopped_goes_on_and_sends_no_shard_twice(
    s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = {"shard_size": 1000}
    gm.merge(recipe(s3.here, output=shards), tmp_path / "stopped")
    sent: list[str] = []
    whole = Upload.send_file

    def counting(self: Upload, path: Path, name: str) -> None:
        whole(self, path, name)
        sent.append(name)

    monkeypatch.setattr(Upload, "send_file", counting)
    asked = recipe("s3://bucket", output=shards)
    with pytest.raises(KeyboardInterrupt):
        gm.merge(asked, "s3://bucket/stopped", progress=Stop(4), threads=1, block=100)
    early = set(there(s3, "bucket/stopped"))
    assert UNFINISHED in early and any("-of-" in name for name in early) and "config.json" not in early
    left = [path.name for path in (tmp_path / "cache").rglob("*.safetensors")]
    assert left and not set(left) & early
    with pytest.raises(gm.InputError, match="stopped"):
        gm.merge(asked | {"damping": 1}, "s3://bucket/stopped", resume=True, block=100)
    done = gm.merge(asked, "s3://bucket/stopped", resume=True, block=100)
    assert len(sent) == len(set(sent)) and not done.already_done
    s3.invalidate_cache()
    assert json.loads(s3.cat_file("bucket/stopped/gradmerge.json"))["resumed_blocks"] >= 4
    same_but_for_places(there(s3, "bucket/stopped"), weight_bytes(tmp_path / "stopped"), s3.here, "s3://bucket")


@pytest.mark.parametrize("again", [{"resume": True}, {}])
def test_a_merge_that_was_killed_before_anything_was_sent_is_known_for_our_own(
    again: dict[str, bool], s3: Any, tmp_path: Path
) -> None:
    asked, out = {"method": "average", "models": ["s3://bucket/a", "s3://bucket/b"]}, f"bucket/killed{len(again)}"
    with pytest.raises(KeyboardInterrupt):
        gm.merge(asked, f"s3://{out}", progress=Stop(1), threads=1)
    assert set(there(s3, out)) == {UNFINISHED}
    s3.pipe_file(f"{out}/mine.csv", b"x")
    with pytest.raises(gm.InputError, match=out):
        gm.merge(asked, f"s3://{out}", **again)
    assert set(there(s3, out)) == {UNFINISHED, "mine.csv"}
    s3.rm_file(f"{out}/mine.csv")
    gm.merge(asked, f"s3://{out}", **again)
    assert {"model.safetensors", "config.json"} <= set(there(s3, out)) and UNFINISHED not in there(s3, out)


@pytest.mark.parametrize("again", [{"resume": True}, {}])
def test_a_store_that_fails_at_the_end_leaves_no_record_and_what_is_left_is_sent_later(
    again: dict[str, bool], s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = f"bucket/failed{len(again)}"
    whole = Upload.send_file

    def failing(self: Upload, path: Path, name: str) -> None:
        if name == "config.json":
            raise gm.MachineError(f"{self.url}/{name}: the network or the store fails")
        whole(self, path, name)

    monkeypatch.setattr(Upload, "send_file", failing)
    asked = recipe("s3://bucket", "average", base=None, output={"shard_size": 1000})
    asked.pop("base")
    with pytest.raises(gm.MachineError, match=r"config\.json"):
        gm.merge(asked, f"s3://{out}")
    s3.invalidate_cache()
    assert not s3.exists(f"{out}/gradmerge.json") and s3.exists(f"{out}/{UNFINISHED}")
    monkeypatch.setattr(Upload, "send_file", whole)
    gm.merge(asked, f"s3://{out}", **again)
    gm.merge(asked | {"models": [str(s3.here / name) for name in "ab"]}, tmp_path / out.partition("/")[2])
    same_but_for_places(there(s3, out), weight_bytes(tmp_path / out.partition("/")[2]), s3.here, "s3://bucket")
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_an_input_that_is_wrong_leaves_nothing_at_the_url(s3: Any, tmp_path: Path) -> None:
    state = near(random_state(0), 3)
    state["layers.1.norm.weight"][0] = float("nan")
    s3.put(str(write_model(tmp_path / "nan", state)), "bucket/nan", recursive=True)
    asked = {"method": "average", "models": ["s3://bucket/a", "s3://bucket/nan"], "output": {"shard_size": 500}}
    with pytest.raises(gm.InputError, match=r"s3://bucket/nan: layers\.1\.norm\.weight"):
        gm.merge(asked, "s3://bucket/none", threads=1)
    assert there(s3, "bucket/none") == {}


def test_an_object_that_changes_during_the_merge_is_noticed(s3: Any) -> None:
    class Changing(Stop):
        def advance(self, amount: int) -> None:
            s3.pipe_file("bucket/changing/config.json", b'{"model_type": "test", "more": 1}')

    s3.copy("bucket/a/", "bucket/changing/", recursive=True)
    asked = {"method": "average", "models": ["s3://bucket/changing", "s3://bucket/b"]}
    with pytest.raises(gm.MachineError, match=r"s3://bucket/changing/config\.json"):
        gm.merge(asked, "s3://bucket/changed", progress=Changing())
    assert there(s3, "bucket/changed") == {}


def test_a_recipe_at_a_url_names_models_relative_to_it(s3: Any, tmp_path: Path) -> None:
    written = {"method": "average", "models": ["../a", "../b"]}
    s3.pipe_file("bucket/recipes/r.yml", yaml.safe_dump(written).encode())
    done = CliRunner().invoke(app, ["merge", "s3://bucket/recipes/r.yml", "-o", str(tmp_path / "out"), "--json"])
    assert done.exit_code == 0, done.output
    gm.merge({"method": "average", "models": [f"{s3.here}/a", f"{s3.here}/b"]}, tmp_path / "local/out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "local/out/model.safetensors").read_bytes()
    text = recipe_documents(gm.load_recipe("s3://bucket/recipes/r.yml"), tmp_path)
    models = [model["model"] for model in yaml.safe_load(text)["models"]]
    assert models == ["s3://bucket/a", "s3://bucket/b"]


def test_the_command_line_takes_urls_everywhere(s3: Any) -> None:
    s3.pipe_file("bucket/rows.csv", b"text,label\na film,1\n")
    assert list(gm.read_rows("s3://bucket/rows.csv").rows) == [{"text": "a film", "label": "1"}]
    for words in (
        ["inspect", "s3://bucket/a", "s3://bucket/b", "--json"],
        ["curvature", "show", "s3://bucket/a/curvature"],
        ["merge", "-m", "average", "--model", "s3://bucket/a", "-o", "s3://bucket/by-options"],
    ):
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and "gradmerge-" not in done.output, done.output


@pytest.mark.parametrize(
    ("words", "url"),
    [
        (["inspect", "s3://bucket/none"], "s3://bucket/none"),
        (["inspect", "s3://nowhere/none"], "s3://nowhere/none"),
        (["merge", "s3://bucket/none.yml", "-o", "x"], "s3://bucket/none.yml"),
        (["merge", "s3://bucket/a", "-o", "x"], "s3://bucket/a"),
        (["merge", "-m", "average", "--model", "s3://bucket/a", "-o", "https://host/x"], "https://host/x"),
        (["merge", "-m", "average", "--model", "s3://bucket/a", "-o", "s3://nowhere/x"], "s3://nowhere/x"),
        (["evaluate", "s3://bucket/a", "-d", "s3://bucket/x.jsonl"], "s3://bucket/x.jsonl"),
        (["evaluate", "s3://bucket/a", "-d", "s3://bucket/b"], "s3://bucket/b"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_by_its_name(
    words: list[str], url: str, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = CliRunner().invoke(app, words)
    assert (ended.exit_code, "Traceback" in ended.output) == (2, False), ended.output
    assert url in " ".join(ended.output.split())
    assert not any(path.name in ("x", "s3:") for path in tmp_path.iterdir())


def test_an_unreachable_store_ends_with_status_1(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(remote, "TRIES", 1)
    monkeypatch.setattr("s3fs.S3FileSystem.retries", 1)
    fsspec.filesystem("s3").clear_instance_cache()
    ended = CliRunner().invoke(app, ["inspect", "s3://elsewhere/a"])
    fsspec.filesystem("s3").clear_instance_cache()
    assert ended.exit_code == 1 and "s3://elsewhere/a" in ended.output


def test_secrets_of_urls_are_nowhere(s3: Any, tmp_path: Path) -> None:
    secrets = ("geheim-word", "geheim-signature")
    outputs = []
    with web_server() as web:
        web.user = f"me:{secrets[0]}"
        for name in MODELS:
            web.files[f"{name}.safetensors"] = (s3.here / "base/model.safetensors").read_bytes()
        web.files["r.yml"] = yaml.safe_dump(
            {"method": "average", "models": [f"http://{web.user}@{web.address}/a.safetensors", "b.safetensors"]}
        ).encode()
        url = f"http://{web.user}@{web.address}/%s.safetensors?X-Amz-Signature={secrets[1]}"
        recipe_file = tmp_path / "given.yml"
        recipe_file.write_text(yaml.safe_dump({"method": "average", "models": [url % "a", url % "b"]}))
        for words, status in (
            (["merge", str(recipe_file), "-o", str(tmp_path / "one")], 0),
            (["merge", "-m", "average", "--model", url % "a", "--model", url % "b", "-o", "s3://bucket/two"], 0),
            (["merge", f"http://{web.user}@{web.address}/r.yml", "-o", str(tmp_path / "three"), "--json"], 0),
            (["merge", str(recipe_file), "-o", str(tmp_path / "four"), "--dry-run", "--json"], 0),
            (["inspect", url % "a", "--json"], 0),
            (["inspect", url % "none", "--debug"], 2),
            (["merge", "-m", "average", "--model", url % "a", "-o", f"{url % 'x'}/out", "--debug"], 2),
            (["merge", "-m", "average", "--model", url % "a", "-o", f"s3://me:{secrets[0]}@bucket/none/x"], 2),
            (["inspect", f"memory://me:{secrets[0]}@bucket/none", "--debug"], 2),
            (["curvature", "show", url % "a"], 2),
        ):
            ended = CliRunner().invoke(app, words)
            assert ended.exit_code == status, (words, ended.output)
            outputs.append(ended.output)
        web.status = 403
        remote._copies.clear()
        outputs.append(CliRunner().invoke(app, ["inspect", url % "a", "--debug"]).output)
    assert "X-Amz-Signature=***" in outputs[-1]
    written = {str(path): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != recipe_file}
    written |= {name: s3.cat_file(name) for name in s3.find("bucket/two")}
    assert len(written) > 8
    for secret in secrets:
        assert not [output for output in outputs if secret in output]
        assert not [name for name, content in written.items() if secret.encode() in content]
    record = json.loads((tmp_path / "one/gradmerge.json").read_text())
    assert record["inputs"][0]["source"].startswith("http://***@127.0.0.1")


@pytest.fixture
def hub(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The models on the Hub, and nothing in its cache."""
    with stand_in() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", found.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for name in MODELS:
            files = found.make(f"org/{name}")
            for path in (s3.here / name).rglob("*"):
                if path.is_file():
                    files[path.relative_to(s3.here / name).as_posix()] = path.read_bytes()
        yield found


def test_a_hub_model_is_read_by_ranges_and_each_byte_once(
    hub: Hub, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradmerge.io import range_reader as ranges

    monkeypatch.setattr(ranges, "HEAD", 700)
    monkeypatch.setattr(ranges, "PIECE", 600)
    # Of models as small as these, a sample would be all.
    monkeypatch.setattr("gradmerge.checkpoints.compat.lineage.RUN", 1)
    monkeypatch.setattr("gradmerge.engine.run.to_folder.coefficient_notes", lambda *_: [])
    monkeypatch.setattr(ranges, "SAMPLE", 4)
    monkeypatch.setattr(ranges, "FAR", 0)
    gm.merge(recipe(s3.here), tmp_path / "local/out")
    asked = {"method": "gradient-matching", "base": "org/base", "models": ["org/a@main", "hf://org/b"]}
    assert CliRunner().invoke(app, ["inspect", "org/base"]).exit_code == 0
    weights = {name: content for files in hub.repos.values() for name, content in files["main"].items()}
    looked_at = sum(count for name, count in hub.given.items() if name.endswith(".safetensors"))
    assert looked_at <= 700
    hub.given.clear()
    remote._copies.clear()
    gm.merge(asked, tmp_path / "out")
    own, local = weight_bytes(tmp_path / "out"), weight_bytes(tmp_path / "local/out")
    assert {n: c for n, c in own.items() if n != "README.md"} == {n: c for n, c in local.items() if n != "README.md"}
    total = sum(len(c) for files in hub.repos.values() for n, c in files["main"].items() if n.endswith(".safetensors"))
    given = sum(count for name, count in hub.given.items() if name.endswith(".safetensors"))
    assert 0.9 * total < given < 1.05 * total
    assert not hub.whole and "notes.md" not in hub.given and weights
    assert not list((tmp_path / "hub").rglob("*.safetensors"))
    inputs = json.loads((tmp_path / "out/gradmerge.json").read_text())["inputs"]
    commits = {one["hub_id"]: one["commit"] for one in inputs if "hub_id" in one}
    assert commits == dict.fromkeys(("org/base", "org/a@main", "org/b"), "0" * 40)
    front = yaml.safe_load(own["README.md"].decode().split("---")[1])
    assert front["base_model"] == ["org/base", "org/a", "org/b"]


def test_what_the_cache_of_the_hub_holds_is_used_without_the_network(hub: Hub, s3: Any, tmp_path: Path) -> None:
    for name in ("a", "b"):
        home = tmp_path / "hub" / f"models--org--{name}"
        shutil.copytree(s3.here / name, home / "snapshots" / ("0" * 40))
        (home / "refs").mkdir()
        (home / "refs/main").write_text("0" * 40)
    hub.log.clear()
    asked = {"method": "average", "models": ["org/a", "org/b"]}
    gm.merge(asked, tmp_path / "out")
    assert [line for line in hub.log if "/org/" in line] == []
    inputs = json.loads((tmp_path / "out/gradmerge.json").read_text())["inputs"]
    assert [(one["hub_id"], one["commit"]) for one in inputs] == [("org/a", "0" * 40), ("org/b", "0" * 40)]
    # A shard is missing: the rest is read there.
    (tmp_path / "hub/models--org--b/snapshots" / ("0" * 40) / "model-00002-of-00003.safetensors").unlink()
    gm.merge(asked, tmp_path / "again")
    assert any("/org/b/resolve/" in line for line in hub.log) and not any("/org/a/" in line for line in hub.log)
    assert weight_bytes(tmp_path / "again")["model.safetensors"] == weight_bytes(tmp_path / "out")["model.safetensors"]


def test_a_hub_that_ignores_ranges_or_has_no_such_model_is_one_message(hub: Hub) -> None:
    with pytest.raises(gm.InputError, match="org/none"):
        opening.open_checkpoint("org/none")
    with pytest.raises(gm.InputError, match="hf://org/none"):
        opening.open_checkpoint("hf://org/none")
    hub.ignores_ranges = True
    with opening.open_checkpoint("org/base") as model:  # smaller than what is asked for first
        assert model.tensors
    hub.repos["org/base"]["main"]["model.safetensors"] += b" " * 70_000
    remote._copies.clear()
    with pytest.raises(gm.InputError, match="org/base"):
        opening.open_checkpoint("org/base")


def test_an_adapter_that_names_a_url_as_its_base_is_not_followed(s3: Any, tmp_path: Path) -> None:
    shutil.copytree(s3.here / "lora", tmp_path / "lora")
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    (tmp_path / "lora/adapter_config.json").write_text(
        json.dumps(config | {"base_model_name_or_path": "s3://bucket/base"})
    )
    with pytest.raises(gm.InputError, match="s3://bucket/base"):
        opening.open_checkpoint(tmp_path / "lora")
