"""The processes of one run, as torchrun and `accelerate launch` start them.

Every process runs the same program on its share of the rows. They meet at the end, to add up what they computed. If
one process fails, the launcher ends the others.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from .errors import InputError, MachineError

if TYPE_CHECKING:
    from torch import Tensor

#: How long a process waits for the others: shares of the rows may take unequal time.
TIMEOUT = timedelta(hours=2)
#: Seconds that another process gives the first one to report the same error.
GRACE = 5.0


class Launch(NamedTuple):
    """What a launcher sets in the environment."""

    rank: int
    world_size: int
    local_rank: int
    """The rank on this machine, which selects the GPU."""


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
        if self.world_size == 1:
            return
        import torch.distributed as dist

        with _lost_process():
            for tensor in tensors:
                whole = tensor.detach().contiguous()
                dist.all_reduce(whole)
                if whole.data_ptr() != tensor.data_ptr():
                    tensor.detach().copy_(whole)

    def all_gather(self, value: Any) -> list[Any]:
        """Return the ``value`` of every process, by rank."""
        if self.world_size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.world_size
        with _lost_process():
            dist.all_gather_object(values, value)
        return values

    def check_equal(self, facts: dict[str, Any]) -> None:
        """Raise InputError if a fact differs between processes, for example because they see different files."""
        every = self.all_gather(facts)
        for rank, others in enumerate(every):
            for name, value in every[0].items():
                if others.get(name) != value:
                    raise InputError(
                        f"processes differ in {name}: {others.get(name)!r} in process {rank}, {value!r} in process 0. "
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

    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE") or 1)))
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        try:
            dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=TIMEOUT)
        except (RuntimeError, ValueError) as error:
            address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
            raise MachineError(
                f"process {launch.rank} of {launch.world_size} cannot join the others at {address}: "
                f"{str(error).splitlines()[0]}. GLOO_SOCKET_IFNAME names the network interface to use."
            ) from error
    return initialized()


class Stopped(KeyboardInterrupt):
    """The launcher stopped this process: another one failed, or the user stopped the run."""


def stop_on_sigterm() -> None:
    """Handle SIGTERM, which launchers send, like Ctrl-C, so that no unfinished output remains."""

    def stop(*_: Any) -> NoReturn:
        raise Stopped

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, stop)


def reports(error: BaseException, status: int) -> bool:
    """Return whether this process reports an error. Processes that all fail alike let the first one report it."""
    launch = launched()
    if launch is None or launch.rank == 0:
        return True
    if isinstance(error, Stopped):
        return False
    # The launcher stops this process as soon as another one has reported its error.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(status))
    time.sleep(GRACE)
    return True
