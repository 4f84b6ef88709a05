"""The server as an app of Flower's: `serverapp = "gradmerge.federated.server_app:app"`."""

from __future__ import annotations

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from ..errors import GradmergeError
from .running import refine_with_clients
from .settings import ServerSettings

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Refine with the clients that are there, as the run's configuration says."""
    try:
        done = refine_with_clients(grid, ServerSettings.read(context.run_config), lambda text: print(text, flush=True))
    except GradmergeError as error:
        raise SystemExit(f"error: {error}") from None
    print(f"{done['output']}: written", *done["notes"], sep="\n", flush=True)
