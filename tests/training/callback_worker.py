"""One of several processes that train together, with each source."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import torch

import gradmerge as gm
from gradmerge.errors import InputError

from .callback_runs import bert, sentences, trainer_for


def callbacks() -> dict[str, gm.CurvatureCallback]:
    return {
        "adam": gm.CurvatureCallback("adam"),
        "online": gm.CurvatureCallback("online", every=2, decay=0.8, likelihood="sampled"),
        "uneven": gm.CurvatureCallback("pass", likelihood="sampled", limit=7),
        "few": gm.CurvatureCallback("pass", limit=1),
    }


def train(out: Path, kind: str, batch: int, callback: bool = True) -> dict[str, torch.Tensor]:
    """Train on 16 examples for four steps; with `pass` for three on 11, which processes cannot share equally."""
    model = bert()
    data = sentences(16 if kind in ("adam", "online") else 11)
    settings = {"per_device_train_batch_size": batch, "num_train_epochs": 1, "save_strategy": "epoch"}
    trainer_for(out / kind, model, data, callbacks()[kind] if callback else None, **settings).train()
    return model.state_dict()


def main() -> None:
    """Two processes, of which the second is forked off before anything is computed: both have imported all once."""
    torch.set_num_threads(1)
    second = os.fork()
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = "0" if second else "1"
    try:
        work(Path(sys.argv[1]))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    if not second:
        sys.stdout.flush()
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(second, 0)[1]))


def work(out: Path) -> None:
    for kind in callbacks():
        trained = train(out, kind, 2)
        if kind == "online":
            without = train(out / "without", kind, 2, callback=False)
            assert all(torch.equal(trained[name], without[name]) for name in without)
    try:
        trainer_for(out / "sharded", bert(), sentences(16), gm.CurvatureCallback("pass"), fsdp=True).train()
    except InputError as error:
        (out / "refused.json").write_text(json.dumps(str(error)))


if __name__ == "__main__":
    main()
