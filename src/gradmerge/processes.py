"""The processes of one run, as torchrun and `accelerate launch` start them: who takes which rows, and sums over all.

Every process runs the same program on rows of its own, and they meet where sums are added up
(:mod:`gradmerge.process_group`). Without such a launcher there is one process, and all of this is nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .errors import InputError
from .progress import Progress

if TYPE_CHECKING:
    from torch import Tensor

    from .process_group import Group

#: Seconds that a process which failed gives the first one to say so.
GRACE = 10.0


class Announced(NamedTuple):
    """What a launcher tells a process of its place."""

    rank: int
    number: int
    """How many there are."""
    local: int
    """Its number on its own machine, which picks its GPU."""


def announced() -> Announced | None:
    """What torchrun or `accelerate launch` has put into the environment; None for one process."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    texts = [os.environ.get(name, "") for name in names]
    if not all(texts) or not os.environ.get("MASTER_ADDR") or not os.environ.get("MASTER_PORT"):
        return None
    try:
        found = Announced(*map(int, texts))
    except ValueError:
        raise InputError(f"{', '.join(names)} in the environment are {', '.join(texts)}: not whole numbers") from None
    if not 0 <= found.rank < found.number or found.local < 0:
        raise InputError(f"RANK={found.rank} in the environment: not one of WORLD_SIZE={found.number} processes")
    return found if found.number > 1 else None


class Processes:
    """One process that is alone; :class:`gradmerge.process_group.Group` is one of several."""

    rank, count = 0, 1
    _called = -1

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and prints."""
        return self.rank == 0

    def share(self, total: int) -> range:
        """Which of ``total`` rows this process takes: one stretch, in the order of the processes."""
        return range(total * self.rank // self.count, total * (self.rank + 1) // self.count)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes, the same bits in all of them.

        They must give the same shapes and types in the same order. The same processes add in the same order each time.
        """

    def gather(self, value: Any) -> list[Any]:
        """What every process gives, in their order: values that JSON can hold."""
        return [value]

    def rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors with one row per example, joined in the order of the processes; one without examples gives none."""
        return list(tensors)

    def wait(self) -> None:
        """Until all have come here."""

    def check(self) -> None:
        """Raise if another process has failed."""

    def call(self, meeting: int) -> None:
        """Ask all to come to a meeting, after what they are at."""
        self._called = meeting

    def called(self, meeting: int) -> bool:
        """Whether somebody has."""
        return self._called == meeting

    def shared(self, progress: Progress) -> Progress:
        """What tells the first process's ``progress`` how far all of them are together."""
        return progress

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """An error inside is raised in every process, instead of leaving the others waiting; all end it together."""
        yield

    def agree(self, facts: dict[str, Any]) -> None:
        """Raise if a fact is not the same in all processes, as where they see other files."""
        for rank, others in enumerate(every := self.gather(facts)):
            for name in facts:
                if others.get(name) != every[0].get(name):
                    told = f"process {rank} has {others.get(name)!r}, and process 0 {every[0].get(name)!r}"
                    raise InputError(f"the processes do not see the same {name}: {told}. Give all the same files.")


ALONE = Processes()
_joined: Group | None = None


def current() -> Processes:
    """This process among those that a launcher started, joined on first use; or alone."""
    global _joined
    if _joined is None and (found := announced()) is not None:
        from .process_group import Group

        _joined = Group(found)
        atexit.register(_joined.leave)
    return ALONE if _joined is None else _joined


def joined() -> Group | None:
    """The group, where this process has joined one."""
    return _joined


class Stopped(KeyboardInterrupt):
    """The launcher ended this process, since another one has ended or somebody asked it to."""


def stop_with_the_others() -> None:
    """Let what a launcher sends to end a process end it as Ctrl-C does, so that nothing half-done stays."""

    def stop(*_: Any) -> NoReturn:
        raise Stopped

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


def end_with_the_first(status: int) -> None:
    """Of processes that all fail alike before they have met, let the first one speak: the launcher ends the rest."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
    time.sleep(GRACE)
