"""`gradmerge remove --model`: a step that is too long is refused, or noted if that is accepted."""

from __future__ import annotations

import json
from pathlib import Path

import gradmerge as gm

from ..making import random_curvature, run, three_models


def test_a_step_that_is_too_long_is_refused_or_noted(tmp_path: Path) -> None:
    folders, states = three_models(tmp_path)
    for seed, (folder, state) in enumerate(zip(folders, states, strict=True)):
        sums = random_curvature(seed, state).sum()
        if seed == 0:  # the base has no curvature for one layer
            sums["layers.0.linear.weight"][:] = 0.0
        gm.Curvature(sums, 100).save(folder / "curvature")
    words = ["remove", "--base", folders[0], "--model", folders[1]]
    unbounded = ["--set", "damping=1e-10", "--set", "cap=none", "-o", tmp_path / "out"]
    assert not run(*words, "-o", tmp_path / "bounded").stderr
    run(*words, *unbounded, status=2)
    assert not (tmp_path / "out").exists()
    (note,) = json.loads(run(*words, *unbounded, "--json", "--accept-untrusted").stdout)["notes"]
    assert json.loads((tmp_path / "out" / "gradmerge.json").read_text())["notes"] == [note]
