"""The server as an app of Flower's: `serverapp = "gradmerge.federated.server_app:app"`."""

from __future__ import annotations

import json
import os
import traceback
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..errors import GradmergeError
from ..text import to_json
from .running import refine_with_clients
from .settings import ServerSettings

#: Names a file for `gradmerge federated serve` to read what happens from: a line of JSON each.
TOLD = "GRADMERGE_FEDERATED_TOLD"

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Refine with the clients that are there, as the run's configuration says."""
    try:
        done = refine_with_clients(grid, ServerSettings.read(context.run_config), lambda text: tell(say=text))
    except GradmergeError as error:
        tell(error=str(error), status=error.status)
        raise SystemExit(f"error: {error}") from None
    except Exception as error:
        tell(error=f"{type(error).__name__}: {error}\n{traceback.format_exc()}", status=1)
        raise
    tell(done=done)


def tell(**facts: Any) -> None:
    """To the log of the run, and to who started it if that asked for it."""
    if "say" in facts:
        print(facts["say"], flush=True)
    path = os.environ.get(TOLD)
    if path:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(json.loads(to_json(facts))) + "\n")
