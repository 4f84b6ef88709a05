"""A refinement whose owners are clients of Flower's, from the folder of a merge to that of the result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ..api.refining import card_of, facts_of, rounded_as_stored, write_result
from ..engine.reads import changed, model_paths, state_of
from ..errors import InputError, MachineError
from ..refinement.guarded import LEAST_SCORE, refine_model
from ..refinement.held_to_base import matrix_of, penalty_of
from ..refinement.newton import Penalty, Progressed, losses_at
from ..refinement.points import copied, set_weights, trained
from ..refinement.rounds import Refinement
from ..refinement.saving import Start, notes_of_folder, opened_start
from ..storage.staging import Staging
from .remote_owner import ClientLost, Federation, RemoteOwner
from .settings import ServerSettings

if TYPE_CHECKING:
    from flwr.serverapp import Grid

Say = Callable[[str], None]
#: What stands in a record where data would be named.
KEPT = "kept by its owner"


def refine_with_clients(grid: Grid, settings: ServerSettings, say: Say = lambda text: None) -> dict[str, Any]:
    """Refine a model with the clients that are there, and write it; what was done, as a record says it."""
    begun, out = time.perf_counter(), Path(settings.out)
    penalty, base = settings.penalty or None, settings.base or None
    models = [path for one in (settings.model, base, penalty) for path in model_paths(one)]
    with (
        Staging(out, "refinement", reads=models, force=settings.force) as staging,
        opened_start(settings.model, settings.loading) as start,
    ):
        files = state_of(models)
        held_to, penalty_facts, notes = penalty_of(start, penalty, base)
        stand_in, told = _stand_in(start)
        federation = Federation(grid, start.model, timeout=settings.timeout, diagonal=stand_in)
        say(f"{settings.model}: waiting for {settings.clients} clients")
        everyone, refused = federation.gather(settings.clients, settings.wait)
        lost = _Lost(federation, settings, say)
        try:
            lost.take(refused)
            for owner in everyone:
                say(f"client {owner.name}: {owner.rows} rows, {owner.held} held back{_private(owner)}")
            done = _refine(start.model, federation, settings.rounds, held_to, lost, say)
            moved = lost.retried(lambda: rounded_as_stored(start, federation.owners, done))
        finally:
            federation.end()
        if path := changed(files, state_of(models)):
            raise MachineError(f"{path}: changed while it was being used, so that nothing was written. Refine again.")
        owners = federation.owners
        if any(owner.privacy for owner in owners):
            notes.append("losses with differential privacy are noisy: the result may be worse than the start after all")
        if all(owner.privacy for owner in owners):
            notes += told
        done.notes = [*staging.notes, *start.notes, *notes, *lost.notes, *done.notes, *notes_of_folder(start)]
        for owner in owners:
            first, last = (one.held[owner.name] for one in (done.rounds[0], done.rounds[-1]))
            done.before[owner.name], done.after[owner.name] = {"loss_per_example": first}, {"loss_per_example": last}
            done.gains[owner.name] = {}
        done.seconds = time.perf_counter() - begun
        sources = {owner.name: KEPT for owner in owners}
        facts = facts_of(done, owners, sources, {}, {"penalty_of": penalty_facts, "seed": None})
        facts["clients"] = {owner.name: {"privacy": owner.privacy or None} for owner in owners}
        facts["lost"] = lost.failures
        card = card_of(start, done, owners) + "\nThe rows stayed with their owners, and were asked over Flower.\n"
        write_result(staging, start, moved, done, facts, card, [], [])
    for owner in owners:
        if owner.privacy:
            say(f"client {owner.name}: ε = {owner.privacy['epsilon']:.3g} in all, at δ = {owner.privacy['delta']:g}")
    return {"output": str(out), **facts, "improved": done.improved, "seconds": done.seconds, "notes": done.notes}


class _Lost:
    """Clients that failed, and whether the others go on without them."""

    def __init__(self, federation: Federation, settings: ServerSettings, say: Say) -> None:
        self._federation, self._settings, self._say = federation, settings, say
        self.failures: dict[str, str] = {}

    def take(self, failures: dict[str, str]) -> None:
        """Leave these out, if that is allowed; otherwise it ends here."""
        self._federation.leave_out(list(failures))
        self.failures |= failures
        for name, why in failures.items():
            self._say(f"client {name} is left out: {why}")
        left = len(self._federation.owners)
        if failures and self._settings.on_failure == "stop":
            raise MachineError(
                f"{ClientLost(failures)}. Nothing was written: mend it and begin again, or let the others go on "
                "without it (on-failure continue)."
            )
        if left < self._settings.minimum:
            why = f": {ClientLost(self.failures)}" if self.failures else ""
            raise MachineError(
                f"{left} clients are left, where at least {self._settings.minimum} are asked for, and nothing was "
                f"written{why}"
            )

    def retried(self, work: Callable[[], Any]) -> Any:
        """Work, and again without those that failed."""
        while True:
            try:
                return work()
            except ClientLost as lost:
                self.take(lost.failures)

    @property
    def notes(self) -> list[str]:
        return [f"client {name} was left out: {why}" for name, why in self.failures.items()]


def _refine(
    model: nn.Module, federation: Federation, rounds: int, penalty: Penalty | None, lost: _Lost, say: Say
) -> Refinement:
    """Refine in place. If a client is lost, the others go on from where the model is, with losses of their own."""
    parameters = trained(model)
    start = copied(parameters)
    state: Progressed | None = None

    def told(progressed: Progressed) -> None:
        then, now = progressed.done.rounds[-2:]
        say(f"round {len(progressed.done.rounds) - 1}: held-back loss {then.judged:.4g} → {now.judged:.4g}")
        for owner in federation.owners:
            if owner.privacy:
                say(f"  client {owner.name}: ε = {owner.privacy['epsilon']:.3g} so far")

    def measured() -> Progressed:
        """The start and where the model is now, in the eyes of those who are left."""
        here = copied(parameters)
        done = Refinement(model, "newton")
        try:
            set_weights(parameters, start)
            done.rounds.append(losses_at(model, federation.owners, penalty, done))
            done.doubted = [o.name for o in federation.owners if o.label_score(model, held=False) < LEAST_SCORE]
            set_weights(parameters, here)
            now = losses_at(model, federation.owners, penalty, done)
        finally:
            set_weights(parameters, here)
        if now.judged < done.rounds[0].judged and now.rows < done.rounds[0].rows:
            done.rounds.append(now)
            return Progressed(done, weights=here)
        return Progressed(done, weights=start)

    while True:
        try:
            return refine_model(model, federation.owners, "newton", rounds, penalty=penalty, so_far=state, told=told)
        except ClientLost as failed:
            lost.take(failed.failures)
            state = lost.retried(measured)
            set_weights(parameters, start)  # which is what a result that learned from noise goes back to


def _private(owner: RemoteOwner) -> str:
    if not owner.privacy:
        return ""
    told = owner.privacy
    return f", differential privacy with noise {told['noise']:g} (ε = {told['epsilon']:.3g} so far)"


def _stand_in(start: Start) -> tuple[dict[str, Tensor] | None, list[str]]:
    """The diagonal that stands in where no client tells its curvature: that of the merge, if it has one beside it."""
    folder = start.info.folder / "curvature"
    found: dict[str, Tensor] = {}
    if folder.is_dir():
        with contextlib.suppress(InputError):  # of another kind
            found = matrix_of(start, str(folder))
    if found.keys() != trained(start.model).keys():
        return None, ["no client told its curvature, and no diagonal lies beside the model: steps follow the gradient"]
    return found, ["no client told its curvature: that in curvature/ beside the model stood in for it"]
