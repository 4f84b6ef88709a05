"""What a server and a client are told: by options of ours, or by Flower's run and node configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError
from ..tasks import Loading, parse_columns
from ..tasks.loading import DEFAULTS
from ..text import nearest
from .remote_owner import NAME

Settings = TypeVar("Settings", bound="_Told")


@dataclass(frozen=True)
class _Told:
    model: str = ""
    """Folder or Hub id of the model, or a LoRA adapter's folder."""
    loading: Loading = field(default_factory=lambda: DEFAULTS.copy())
    """How the model and its data are loaded."""

    @classmethod
    def read(cls: type[Settings], told: Mapping[str, Any]) -> Settings:
        """From a configuration of Flower's: names with dashes, and a value of "" is the default."""
        types = {one.name: str(one.type) for one in fields(cls) if one.name != "loading"}
        found: dict[str, Any] = {}
        loading = DEFAULTS.copy()
        known = [name.replace("_", "-") for name in [*types, *DEFAULTS]]
        for key, value in told.items():
            name = key.replace("-", "_")
            if name not in types and name not in DEFAULTS:
                raise InputError(f"{key}: is not known{nearest(key, known)}\n  Known are {', '.join(known)}.")
            if value == "":
                continue
            if name in DEFAULTS:
                loading[name] = parse_columns(str(value)) if name == "columns" else value  # type: ignore[literal-required]
                continue
            found[name] = _fitting(key, value, types[name])
        return cls(loading=loading, **found)


@dataclass(frozen=True)
class ServerSettings(_Told):
    """A refinement, as the server is told."""

    out: str = ""
    """Folder to write."""
    clients: int = 2
    """How many clients to wait for."""
    rounds: int = 2
    wait: float = 600.0
    """Seconds to wait for the clients."""
    timeout: float = 600.0
    """Seconds that an answer may take."""
    on_failure: str = "stop"
    """`stop` or `continue`, without the client that failed."""
    minimum: int = 1
    """With `continue`: fewer clients than this end it."""
    penalty: str = ""
    base: str = ""
    force: bool = False

    def __post_init__(self) -> None:
        for name in ("model", "out"):
            if not getattr(self, name):
                raise InputError(f"{name} is missing: give the {'merged model' if name == 'model' else 'new folder'}")
        if self.on_failure not in ("stop", "continue"):
            raise InputError(f"on-failure {self.on_failure!r}: known are stop and continue")
        for name in ("clients", "rounds", "minimum"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} {getattr(self, name)}: at least one is needed")
        for name in ("wait", "timeout"):
            if not 0 < getattr(self, name) < math.inf:
                raise InputError(f"{name} {getattr(self, name)}: give a number of seconds")


@dataclass(frozen=True)
class ClientSettings(_Told):
    """A task, as its client is told; none of it leaves but the name and the numbers of rows."""

    name: str = ""
    data: str = ""
    """Labelled rows, as `gradmerge refine --data` takes them."""
    valid: str = ""
    """Rows to judge by; by default a tenth of the data is held back."""
    examples: int = 0
    """How many examples the rows stand for; 0 is as many as there are."""
    seed: int = 0
    least_rows: int = 1
    """No answer if there are fewer rows to sum over."""
    most_gradients: int = 0
    """How many gradients are told in one refinement at most; 0 is any number. A round asks for up to three."""
    noise: float = 0.0
    """Differential privacy: noise as a multiple of the bounds below; 0 is none."""
    clip: float = 1.0
    clip_loss: float = 10.0
    clip_curvature: float = 1.0
    epsilon: float = 0.0
    """The budget: no answer by which ε would exceed it."""
    delta: float = 1e-5
    ledger: str = ""
    """The file that counts answers with noise, for ever."""

    def __post_init__(self) -> None:
        for name, what in (("model", "a copy of the merged model"), ("data", "labelled rows"), ("name", "a name")):
            if not getattr(self, name):
                raise InputError(f"{name} is missing: give {what}")
        if not NAME.fullmatch(self.name):
            raise InputError(f"name {self.name!r}: give up to 64 letters, digits, '.', '_' and '-'")
        for name in ("examples", "most_gradients", "noise", "epsilon", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name.replace('_', '-')} {getattr(self, name)}: give a number that is not negative")
        if not self.noise and (self.epsilon or self.ledger):
            raise InputError("epsilon and ledger are of differential privacy: give noise too, such as noise 4")
        if self.noise:
            if not self.epsilon or not self.ledger:
                raise InputError("with noise, give the budget too, such as epsilon 8, and a ledger, a file to count in")
            for name in ("clip", "clip_loss", "clip_curvature"):
                if not 0 < getattr(self, name) < math.inf:
                    raise InputError(f"{name.replace('_', '-')} {getattr(self, name)}: give a number above 0")
            if not 0 < self.delta < 1:
                raise InputError(f"delta {self.delta}: give a number between 0 and 1, far below one over the rows")
            if not Path(self.ledger).absolute().parent.is_dir():
                raise InputError(f"ledger {self.ledger}: its folder is not there")


def defaults_of_server() -> dict[str, Any]:
    """Every key of a server's configuration with its default, as a Flower app declares them."""
    own = {one.name: "" if one.default is MISSING else one.default for one in fields(ServerSettings)}
    keys = {**own, **{name: "" if value is None else value for name, value in DEFAULTS.items()}}
    return {name: value for name, value in keys.items() if name != "loading"}


def _fitting(key: str, value: Any, kind: str) -> Any:
    kinds: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    if not isinstance(value, kinds[kind]) or (kind in ("int", "float") and isinstance(value, bool)):
        words = {"str": "text", "bool": "true or false", "int": "a whole number"}
        raise InputError(f"{key} {value!r}: give {words.get(kind, 'a number')}")
    return float(value) if kind == "float" else value
