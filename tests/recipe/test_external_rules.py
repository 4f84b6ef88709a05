"""Methods from Python files and installed packages; the file is the example of docs/merge.md."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor

import gradmerge as gm
from gradmerge.errors import InputError
from gradmerge.rules import Methods

from ..making import near, random_curvature, random_state, read_model, run, write_model

PAGE = Path(__file__).parents[2] / "docs" / "merge.md"
EXAMPLE = re.findall(r'```python title="median.py"\n(.*?)```', PAGE.read_text("utf-8"), re.DOTALL)[0]
RETURN = "return base + scale * deltas.median(dim=0).values"
STATES = {"base": random_state(0)} | {name: near(random_state(0), i) for i, name in enumerate("abc", 1)}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name, state in STATES.items():
        write_model(tmp_path / name, state)
        random_curvature(1, state).save(tmp_path / name / "curvature")
    (tmp_path / "median.py").write_text(EXAMPLE, "utf-8")
    recipe = {"method": "./median.py", "base": "./base", "models": ["./a", "./b", "./c"], "options": {"scale": 0.9}}
    (tmp_path / "recipe.yml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def expected(scale: float) -> dict[str, Tensor]:
    merged = {}
    for name, base in STATES["base"].items():
        changes = torch.stack([STATES[model][name].double() - base.double() for model in "abc"])
        merged[name] = (base.double() + scale * changes.sort(dim=0).values[1]).float()
    return merged


def test_a_file_is_run_only_with_permission(place: Path) -> None:
    (place / "median.py").write_text("from pathlib import Path\nPath('ran').touch()\n" + EXAMPLE, "utf-8")
    for command in ("merge", "preview", "diagnose"):
        assert "allow-code" in run(command, place / "recipe.yml", "-o", place / "out", status=2).output
    run("methods", place / "median.py", status=2)
    run("merge", "--method", place / "median.py", "--base", "b", "--model", "a", "-o", place / "out", status=2)
    with pytest.raises(InputError, match="allow_code"):
        gm.merge(place / "recipe.yml", place / "out")
    assert not (place / "out").exists()
    assert not Path("ran").exists()


def test_a_merge_by_a_file(place: Path) -> None:
    run("merge", place / "recipe.yml", "--allow-code", "-o", place / "out")
    torch.testing.assert_close(read_model(place / "out"), expected(0.9))
    record = json.loads((place / "out" / "gradmerge.json").read_text())
    assert record["recipe"]["method"] == record["rule"]["file"] == "./median.py"
    assert record["recipe"]["options"] == {"scale": 0.9}
    card = (place / "out" / "README.md").read_text("utf-8")
    assert "**median**" in card
    assert "method: ./median.py" in card


def test_the_fingerprint_includes_the_content_of_the_file(place: Path) -> None:
    prints = set()
    for factor in ("scale", "scale", "0.5 * scale"):
        (place / "median.py").write_text(EXAMPLE.replace("scale * deltas", f"{factor} * deltas"), "utf-8")
        gm.merge(place / "recipe.yml", place / "out", allow_code=True, force=True)
        prints.add(json.loads((place / "out" / "gradmerge.json").read_text())["fingerprint"])
    assert len(prints) == 2
    torch.testing.assert_close(read_model(place / "out"), expected(0.45))


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (None, "cannot be read"),
        ("x = 1", "defines 0 rules"),
        (EXAMPLE + EXAMPLE.replace('"median"', '"second"').replace("def median", "def second"), "defines 2 rules"),
        (EXAMPLE.replace('"median"', '"ties"'), "built-in"),
        (EXAMPLE.replace("base: Tensor", "bass: Tensor"), "bass"),
        (EXAMPLE.replace('Annotated[float, Help("factor of the median", ge=0)]', "float"), "scale"),
        ("import nowhere\n" + EXAMPLE, "line 1: ModuleNotFoundError"),
        ("def f(:", "SyntaxError"),
        ("raise SystemExit(0)", "line 1: SystemExit"),
        (EXAMPLE.replace("return base", "return unknown"), "NameError"),
        (EXAMPLE.replace(RETURN, "return base.sum()"), "shape"),
        (EXAMPLE.replace(RETURN, "return 1.0"), "float"),
    ],
)
def test_invalid_files(place: Path, source: str | None, words: str) -> None:
    if source is None:
        (place / "median.py").unlink()
    else:
        (place / "median.py").write_text(source, "utf-8")
    names = {path.name for path in place.iterdir()}
    output = run("merge", place / "recipe.yml", "--allow-code", "-o", place / "out", status=2).output
    assert words in output
    assert "median.py" in output or "median:" in output
    assert {path.name for path in place.iterdir()} == names


def test_rules_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "plugin_of_test.py").write_text(EXAMPLE, "utf-8")
    metadata = tmp_path / "plugin_of_test-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-of-test\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[gradmerge.rules]\nmedian = plugin_of_test:median\nbroken = plugin_of_test:missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    methods = Methods()
    with pytest.warns(UserWarning, match="broken"):
        assert methods["median"].option_names == {"scale"}
    assert "median" in list(methods)
    assert "broken" not in methods
