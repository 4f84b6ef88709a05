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
from ..storage.staging import Staging
from ..tasks.model_args import ModelArgs


def check_large(kind: str, sums: str | None, at_delta: object, args: ModelArgs) -> None:
    """Raise where options do not go together."""
    if sums is not None:
        check_known(f"--sums {sums}", sums, PLACES)
    quantized = f"load_in_{args.bits}bit"
    given = {"device_map": args.device_map is not None, quantized: bool(args.bits)}
    large = [option for option, is_given in given.items() if is_given]
    if at_delta is not None and large:
        raise InputError(f"at_delta changes the model's weights in memory and cannot be combined with {large[0]}")
    if kind == "gram" and args.bits:
        raise InputError(
            f"{quantized} estimates the parameters of an adapter, and Gram matrices are of the model's own layers"
        )


def keeping_for(model: nn.Module, sums: str | None, out: Path, staging: Staging | None) -> Keeping:
    """Where the sums of a model are kept: where that was asked for, or else where its weights are."""
    if sums is None:
        away = [hook.weights_map for _, _, hook in elsewhere(model)]
        on_disk = any(getattr(getattr(one, "dataset", None), "index", None) for one in away)
        sums = "device" if not away else "disk" if on_disk else "cpu"
    folder = staging.folder if staging is not None else out.parent if out.parent.is_dir() else None
    return Keeping(sums, folder or Path(tempfile.gettempdir()))


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
