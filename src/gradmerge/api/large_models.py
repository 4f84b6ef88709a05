"""What estimates of models larger than a device have in common: where their sums are kept, and the memory they take."""

from __future__ import annotations

import re
import resource
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from ..arguments import check_known
from ..curvature.reaching import elsewhere
from ..curvature.totals import PLACES, Keeping
from ..errors import InputError
from ..processes import Processes, announced
from ..storage.staging import Staging


def check_large(
    kind: str,
    sums: str | None,
    shard: bool,
    processes: bool,
    resume: bool,
    at_delta: object,
    device_map: str | None,
    quantize: str | None,
) -> None:
    """Raise where options do not go together."""
    if sums is not None:
        check_known(f"--sums {sums}", sums, PLACES)
    if shard and not processes and announced() is not None:
        raise InputError("shard=True shares a model out over processes: give processes=True with it, in every process")
    if shard and resume:
        raise InputError("--resume: what is shared out over processes is not saved before its end. Leave one out.")
    given = {"--shard": shard, "--device-map": device_map is not None, "--quantize": quantize not in (None, "none")}
    large = [option for option, is_given in given.items() if is_given]
    if at_delta is not None and large:
        raise InputError(f"--at-delta changes a model's weights in memory, which {large[0]} does not go with")
    if kind == "gram" and given["--quantize"]:
        raise InputError("--quantize measures the parameters of an adapter; Gram matrices are of a model's own layers")


def keeping_for(
    model: nn.Module, sums: str | None, out: Path, staging: Staging | None, group: Processes, shard: bool
) -> Keeping:
    """Where the sums of a model are kept: where that was asked for, or else where its weights are."""
    if sums is None:
        away = [hook.weights_map for _, _, hook in elsewhere(model)]
        on_disk = any(getattr(getattr(one, "dataset", None), "index", None) for one in away)
        sums = "device" if not away else "disk" if on_disk else "cpu"
    folder = staging.folder if staging is not None else out.parent if out.parent.is_dir() else None
    return Keeping(sums, folder or Path(tempfile.gettempdir()), group if shard else None)


def peak_memory() -> dict[str, int]:
    """The most memory that this process has held so far, in bytes: the machine's, and its GPU's if it uses one."""
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    status = Path("/proc/self/status")  # on Linux the other number may be that of the program that started this one
    if status.is_file() and (found := re.search(r"VmHWM:\s+(\d+) kB", status.read_text())):
        own = int(found[1]) * 1024
    memory = {"peak_rss_bytes": own}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        used = [torch.cuda.max_memory_allocated(number) for number in range(torch.cuda.device_count())]
        memory["peak_cuda_bytes"] = sum(used)
    return memory
