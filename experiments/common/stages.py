"""Stages of an experiment: made once, kept on disk, made anew only when what they depend on has changed."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

_RECORD = "stage.json"
_BEGUN = "begun.json"


class Stages:
    """A folder of stages.

    A stage is a folder with the files it made and ``stage.json``: what it was made from, and its result. It appears under its
    name when it is finished. One that was interrupted finds its unfinished folder again and may go on from what is there.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = print) -> None:
        self.folder = folder
        self._say = say
        self._digests: dict[str, str] = {}

    def path(self, name: str) -> Path:
        return self.folder / name

    def run(
        self,
        name: str,
        make: Callable[[Path], Any],
        *,
        given: Mapping[str, Any] | None = None,
        after: Sequence[str] = (),
    ) -> Any:
        """The result of a stage (JSON), from disk or made by ``make(folder)``, which leaves its files in ``folder``.

        ``given`` is all that the stage depends on besides the stages named in ``after``, which must have been run before.
        """
        depends = {
            "given": json.loads(json.dumps(given or {}, default=str)),
            "after": {n: self._digests[n] for n in after},
        }
        digest = hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]
        self._digests[name] = digest
        done = self.path(name)
        record = _read(done / _RECORD)
        if record is not None and record["digest"] == digest:
            return record["result"]
        partial = self._partial(name, digest)
        self._say(f"{self.folder.name}: {name} …")
        begun = time.perf_counter()
        result = json.loads(json.dumps(make(partial)))
        seconds = time.perf_counter() - begun
        (partial / _RECORD).write_text(
            json.dumps({"digest": digest, **depends, "seconds": seconds, "result": result}, indent=1) + "\n"
        )
        (partial / _BEGUN).unlink()
        if done.exists():
            shutil.rmtree(done)
        partial.rename(done)
        self._say(f"{self.folder.name}: {name} done in {seconds:.0f} s")
        return result

    def _partial(self, name: str, digest: str) -> Path:
        """The unfinished folder of the same stage, or an empty one."""
        partial = self.path(name + ".partial")
        begun = _read(partial / _BEGUN)
        if partial.exists() and (begun is None or begun["digest"] != digest):
            shutil.rmtree(partial)
        partial.mkdir(parents=True, exist_ok=True)
        (partial / _BEGUN).write_text(json.dumps({"digest": digest}))
        return partial

    def seconds(self) -> dict[str, float]:
        """What each finished stage took."""
        found = {n: _read(self.path(n) / _RECORD) for n in self._digests}
        return {name: record["seconds"] for name, record in found.items() if record is not None}


def _read(path: Path) -> Any:
    return json.loads(path.read_text()) if path.is_file() else None
