"""Merges from and to URLs have the bytes of local ones, with a local S3 server and a local Hub."""

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
from gradmerge.checkpoints import open_checkpoint
from gradmerge.cli.app import app
from gradmerge.io import range_reader, remote
from gradmerge.io.upload import Upload
from gradmerge.refinement.inputs import recorded_models

from ..api.hub_stand_in import TOKEN, Hub, stand_in
from ..http_stand_in import web_server
from ..making import Stop, near, random_curvature, random_state, weight_bytes, write_model

MODELS = ("base", "a", "b")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A bucket of a local server, with the models of the folder ``here``."""
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
    for seed, name in enumerate(MODELS):
        state = near(base, seed) if seed else base
        folder = write_model(here / name, state, shards=seed + 1)
        random_curvature(seed, state).save(folder / "curvature")
        (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
        (folder / "notes.md").write_text("mine")
    (here / "lora").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["linear"]}
    (here / "lora/adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "../base"}))
    parts = {"lora_A.weight": (2, 8), "lora_B.weight": (16, 2)}
    names = {f"base_model.model.layers.0.linear.{part}": shape for part, shape in parts.items()}
    save_file(random_state(7, names), here / "lora/adapter_model.safetensors")


@pytest.fixture(autouse=True)
def clean_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADMERGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(remote, "PAUSE", 0.001)
    remote._copies.clear()


def recipe(root: object, method: str = "gradient-matching", **more: Any) -> dict[str, Any]:
    return {"method": method, "base": f"{root}/base", "models": [f"{root}/a", f"{root}/b"], **more}


def files_at(fs: Any, path: str) -> dict[str, bytes]:
    """Return every file of a result but its record, as `weight_bytes` does for a folder."""
    fs.invalidate_cache()
    files = {name.removeprefix(f"{path}/"): fs.cat_file(name) for name in fs.find(path)}
    files.pop("gradmerge.json", None)
    return files


def assert_same(got: dict[str, bytes], want: dict[str, bytes], s3: Any) -> None:
    """Assert that files are equal up to the paths of the models."""
    assert {name: content.replace(b"s3://bucket", str(s3.here).encode()) for name, content in got.items()} == want


@pytest.mark.parametrize("case", ["gradient-matching", "ties", "adapter", "to an adapter"])
def test_a_merge_from_and_to_s3_has_the_bytes_of_a_local_one(case: str, s3: Any, tmp_path: Path) -> None:
    def make(root: object) -> dict[str, Any]:
        output = {"shard_size": 1000}
        if case == "gradient-matching":
            return recipe(root, output=output | {"curvature": True})
        if case == "ties":
            return recipe(root, "ties", output=output)
        if case == "adapter":  # its config names a relative base
            return {"method": "average", "models": [f"{root}/lora", f"{root}/a"], "output": output}
        models = {"base": f"{root}/base", "models": [f"{root}/lora"]}
        return {"method": "task-arithmetic", **models, "output": {"format": "adapter"}}

    local, out = tmp_path / f"out {case}", f"bucket/out {case}"
    gm.merge(make(s3.here), local)
    assert str(gm.merge(make("s3://bucket"), f"s3://{out}").output) == f"s3://{out}"
    assert_same(files_at(s3, out), weight_bytes(local), s3)
    assert not [path for path in (tmp_path / "cache/out").rglob("*") if path.is_file()]
    assert gm.merge(make("s3://bucket"), f"s3://{out}", resume=True).already_done


AVERAGE = {"method": "average", "models": ["s3://bucket/a", "s3://bucket/b"]}


def test_only_a_result_of_gradmerge_is_replaced_and_only_with_force(s3: Any) -> None:
    s3.pipe_file("bucket/mine/data.csv", b"x")
    gm.merge(recipe("s3://bucket", output={"shard_size": 1000}), "s3://bucket/out")
    before = files_at(s3, "bucket/out")
    for out, force in (("out", False), ("mine", True), ("a", True), ("a/inside", False)):
        with pytest.raises(gm.InputError, match=f"s3://bucket/{out}"):
            gm.merge(AVERAGE, f"s3://bucket/{out}", force=force)
    assert files_at(s3, "bucket/out") == before and s3.cat_file("bucket/mine/data.csv") == b"x"
    with pytest.raises(gm.InputError):
        gm.merge({**AVERAGE, "options": {"nothing": 1}}, "s3://bucket/out", force=True)
    assert files_at(s3, "bucket/out") == before
    gm.merge(AVERAGE, "s3://bucket/out", force=True)
    assert {"model.safetensors", "README.md"} < set(files_at(s3, "bucket/out"))
    assert not [name for name in files_at(s3, "bucket/out") if "-of-" in name]


@pytest.mark.parametrize("again", [{"resume": True}, {"force": True}])
def test_a_merge_that_was_killed_starts_again_and_uploads_shards_early(
    again: dict[str, bool], s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, out = recipe("s3://bucket", output={"shard_size": 1000}), f"bucket/stopped-{next(iter(again))}"
    monkeypatch.setattr(Upload, "discard", lambda self: None)
    with pytest.raises(KeyboardInterrupt):
        gm.merge(asked, f"s3://{out}", progress=Stop(4), threads=1, block=100)
    early = set(files_at(s3, out))
    assert any("-of-" in name for name in early) and "config.json" not in early
    with pytest.raises(gm.InputError):
        gm.merge(asked, f"s3://{out}")
    gm.merge(asked, f"s3://{out}", **again)
    gm.merge(recipe(s3.here, output={"shard_size": 1000}), tmp_path / out.partition("/")[2])
    assert_same(files_at(s3, out), weight_bytes(tmp_path / out.partition("/")[2]), s3)
    assert not [path for path in (tmp_path / "cache/out").rglob("*") if path.is_file()]


def test_a_store_that_fails_at_the_end_leaves_an_unfinished_result(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    put = Upload._put

    def failing(self: Upload, folder: Path, name: str) -> None:
        if name == "config.json":
            raise gm.MachineError("the network or the store failed")
        put(self, folder, name)

    monkeypatch.setattr(Upload, "_put", failing)
    with pytest.raises(gm.MachineError):
        gm.merge(AVERAGE | {"output": {"shard_size": 1000}}, "s3://bucket/failed")
    assert files_at(s3, "bucket/failed") and not s3.exists("bucket/failed/gradmerge.json")
    monkeypatch.setattr(Upload, "_put", put)
    gm.merge(AVERAGE, "s3://bucket/failed", force=True)
    assert not {".gradmerge", "model-00001-of-00002.safetensors"} & set(files_at(s3, "bucket/failed"))


def test_an_input_that_changes_during_the_merge_is_an_error(s3: Any) -> None:
    class Change(Stop):
        def advance(self, amount: int) -> None:
            s3.pipe_file("bucket/changing/config.json", b'{"model_type": "test", "more": 1}')

    s3.copy("bucket/a/", "bucket/changing/", recursive=True)
    asked = {"method": "average", "models": ["s3://bucket/changing", "s3://bucket/b"]}
    with pytest.raises(gm.MachineError, match=r"s3://bucket/changing/config\.json"):
        gm.merge(asked, "s3://bucket/changed", progress=Change())
    assert files_at(s3, "bucket/changed") == {}


def run(*words: str) -> Any:
    return CliRunner().invoke(app, list(words))


def test_a_recipe_at_a_url_names_models_relative_to_it(s3: Any, tmp_path: Path) -> None:
    s3.pipe_file("bucket/recipes/r.yml", yaml.safe_dump({"method": "average", "models": ["../a", "../b"]}).encode())
    assert run("merge", "s3://bucket/recipes/r.yml", "-o", str(tmp_path / "out"), "--json").exit_code == 0
    gm.merge({"method": "average", "models": [f"{s3.here}/a", f"{s3.here}/b"]}, tmp_path / "local/out")
    assert (tmp_path / "out/model.safetensors").read_bytes() == (tmp_path / "local/out/model.safetensors").read_bytes()
    assert sorted(recorded_models(tmp_path / "out").values()) == ["s3://bucket/a", "s3://bucket/b"]


def test_no_output_contains_the_secrets_of_urls(s3: Any, tmp_path: Path) -> None:
    password, signature = "geheim-word", "geheim-signature"
    recipe_file, outputs = tmp_path / "recipe.yml", []
    with web_server() as web:
        web.user = f"me:{password}"
        for name in "ab":
            web.files[f"{name}.safetensors"] = (s3.here / "base/model.safetensors").read_bytes()
        models = [f"http://{web.user}@{web.address}/a.safetensors", "b.safetensors"]
        web.files["r.yml"] = yaml.safe_dump({"method": "average", "models": models}).encode()
        a, b, x = (
            f"http://{web.user}@{web.address}/{name}.safetensors?X-Amz-Signature={signature}"
            for name in ("a", "b", "x")
        )
        recipe_file.write_text(yaml.safe_dump({"method": "average", "models": [a, b]}))
        for words, status in (
            (["merge", str(recipe_file), "-o", str(tmp_path / "one")], 0),
            (["merge", "-m", "average", "--model", a, "--model", b, "-o", "s3://bucket/two"], 0),
            (["merge", f"http://{web.user}@{web.address}/r.yml", "-o", str(tmp_path / "three"), "--json"], 0),
            (["inspect", x, "--debug"], 2),
            (["merge", "-m", "average", "--model", a, "-o", f"{x}/out", "--debug"], 2),
            (["merge", "-m", "average", "--model", a, "-o", f"s3://me:{password}@bucket/none/x"], 2),
            (["inspect", f"memory://me:{password}@bucket/none", "--debug"], 2),
        ):
            ended = run(*words)
            assert ended.exit_code == status, (words, ended.output)
            outputs.append(ended.output)
        web.status = 403
        remote._copies.clear()
        outputs.append(run("inspect", a, "--debug").output)
    written = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file() and path != recipe_file]
    written += [s3.cat_file(name) for name in s3.find("bucket/two")]
    assert len(written) > 8
    for secret in (password, signature):
        assert not [text for text in (*outputs, *map(repr, written)) if secret in text]
    record = json.loads((tmp_path / "one/gradmerge.json").read_text())
    assert record["inputs"][0]["source"] == record["models"]["a.safetensors"] == f"http://{web.address}/a.safetensors"


@pytest.fixture
def hub(s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with the models, and an empty cache of the Hub."""
    with stand_in() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        for name in MODELS:
            files = hub.make(f"org/{name}")
            for path in (s3.here / name).rglob("*"):
                if path.is_file():
                    files[path.relative_to(s3.here / name).as_posix()] = path.read_bytes()
        yield hub


def test_a_hub_model_is_read_by_ranges_and_each_byte_once(
    hub: Hub, s3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"HEAD": 700, "PIECE": 600, "SAMPLE": 4, "JUMP": 0}.items():
        monkeypatch.setattr(range_reader, name, value)
    # Samples would be the whole of such small models.
    monkeypatch.setattr("gradmerge.checkpoints.comparison.SAMPLE", 1)
    monkeypatch.setattr("gradmerge.engine.run.coefficient_notes", lambda *_: [])

    def downloaded() -> int:
        return sum(nbytes for name, nbytes in hub.given.items() if name.endswith(".safetensors"))

    assert run("inspect", "org/base").exit_code == 0
    assert downloaded() <= 700
    hub.given.clear()
    remote._copies.clear()
    gm.merge(recipe(s3.here), tmp_path / "local/out")
    asked = {"method": "gradient-matching", "base": "org/base", "models": ["org/a@main", "hf://org/b"]}
    gm.merge(asked, tmp_path / "out")
    got, local = weight_bytes(tmp_path / "out"), weight_bytes(tmp_path / "local/out")
    front_matter = yaml.safe_load(got.pop("README.md").decode().split("---")[1])
    assert got == {name: content for name, content in local.items() if name != "README.md"}
    files = [file for repo in hub.repos.values() for file in repo["main"].items()]
    total = sum(len(content) for name, content in files if name.endswith(".safetensors"))
    assert 0.9 * total < downloaded() < 1.05 * total
    assert not hub.whole and "notes.md" not in hub.given and not list((tmp_path / "hub").rglob("*.safetensors"))
    inputs = json.loads((tmp_path / "out/gradmerge.json").read_text())["inputs"]
    commits = {one["hub_id"]: one["commit"] for one in inputs if "hub_id" in one}
    assert commits == dict.fromkeys(("org/base", "org/a@main", "org/b"), "0" * 40)
    assert front_matter["base_model"] == ["org/base", "org/a", "org/b"]


def test_a_url_in_the_config_of_an_adapter_is_not_followed(s3: Any, tmp_path: Path) -> None:
    shutil.copytree(s3.here / "lora", tmp_path / "lora")
    config = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    text = json.dumps(config | {"base_model_name_or_path": "s3://bucket/base"})
    (tmp_path / "lora/adapter_config.json").write_text(text)
    with pytest.raises(gm.InputError, match="s3://bucket/base"):
        open_checkpoint(tmp_path / "lora")
