"""The processes of one run, as torchrun and `accelerate launch` start them.

Every process runs the same program on its share of the rows. They meet at the end, to add up what they computed. If
one process fails, the launcher ends the others.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InputError, MachineError

if TYPE_CHECKING:
    from torch import Tensor

#: How long a process waits for the others, whose shares may take longer. A process that dies ends the wait at once.
TIMEOUT = timedelta(minutes=30)
#: Seconds that another process gives the first one to report the same error.
GRACE = 5.0


class Launch(NamedTuple):
    """What a launcher sets in the environment. ``local_rank`` selects the GPU of the machine."""

    rank: int
    world_size: int
    local_rank: int


def launched() -> Launch | None:
    """Return what torchrun or `accelerate launch` set in the environment, or None for a single process."""
    numbers = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    has_address = os.environ.get("MASTER_ADDR") and os.environ.get("MASTER_PORT")
    if not has_address or not all(number.isdecimal() for number in numbers):
        return None
    launch = Launch(*map(int, numbers))
    return launch if launch.world_size > max(1, launch.rank) else None


class Processes:
    """The processes that share the work; a single one by default."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size

    @property
    def is_first(self) -> bool:
        """Whether this process writes and prints."""
        return self.rank == 0

    def share(self, total: int) -> range:
        """Return this process's contiguous part of ``total`` rows."""
        return range(total * self.rank // self.world_size, total * (self.rank + 1) // self.world_size)

    def all_reduce(self, tensors: Iterable[Tensor]) -> None:
        """Replace each tensor by its sum over the processes. All pass the same shapes in the same order."""
        if self.world_size > 1:
            import torch.distributed as dist

            with _lost_process():
                for tensor in tensors:
                    whole = tensor.detach().contiguous()
                    dist.all_reduce(whole)
                    tensor.detach().copy_(whole)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every process, by rank."""
        values: list[Any] = [value] * self.world_size
        if self.world_size > 1:
            import torch.distributed as dist

            with _lost_process():
                dist.all_gather_object(values, value)
        return values

    def check_equal(self, facts: dict[str, Any]) -> None:
        """Raise InputError if a fact differs between processes, for example because they see different files."""
        first, *every = self.all_gather(facts)
        for rank, others in enumerate(every, 1):
            if different := [name for name in first if others[name] != first[name]]:
                raise InputError(
                    f"processes differ in {', '.join(different)}: {others} in process {rank}, {first} in process 0. "
                    "Give all processes the same files."
                )


SINGLE = Processes()


@contextmanager
def _lost_process() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise MachineError(
            "another process has ended or cannot be reached. Its output, and the system's log if memory ran out, tell "
            "why. Nothing was written under its final name."
        ) from error


def initialized() -> Processes:
    """Return the processes of torch.distributed if a script or trainer has initialized it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return SINGLE
    return Processes(dist.get_rank(), dist.get_world_size())


def join() -> Processes:
    """Join the processes that a launcher started, and return them; a single process if there is no launcher."""
    launch = launched()
    if launch is None:
        return SINGLE
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            raise MachineError(
                f"process {launch.rank} of {launch.world_size} cannot join the others at "
                f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}: {str(error).splitlines()[0]}. "
                "GLOO_SOCKET_IFNAME names the network interface to use."
            ) from error
    return initialized()


def reports(error: BaseException) -> bool:
    """Return whether this process reports an error. Processes that all fail alike let the first one report it."""
    launch = launched()
    if launch is None or launch.rank == 0:
        return True
    if isinstance(error, KeyboardInterrupt):  # the launcher stopped this process, because another one failed
        return False
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # which the launcher sends when another one has reported its error
    time.sleep(GRACE)
    return True
