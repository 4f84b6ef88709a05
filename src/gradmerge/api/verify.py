"""Check that a merged model is what it should be.

Heavy modules are imported in the function: the command line reads the signature of :func:`verify` without PyTorch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from ..arguments import checked
from ..display import Displayed, View
from ..errors import InputError
from ..progress import Progress, shown

if TYPE_CHECKING:
    from ..tasks import LoadOptions

#: Rows that answers are compared on.
ROWS = 16


@dataclass
class Check:
    """One check of a model."""

    name: str
    against: str
    """The model that it is compared with."""
    passed: bool | None
    """None if there was nothing to check."""
    detail: str
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(repr=False)
class Verification(Displayed):
    """What :func:`gradmerge.verify` found."""

    checks: list[Check] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and rows: one row for each check."""
        words = {True: "ok", False: "FAILED", None: "not checked"}
        rows = [[check.name, check.against, words[check.passed], check.detail] for check in self.checks]
        return ["check", "against", "result", "details"], rows

    def to_dict(self) -> dict[str, Any]:
        """Return what ``--json`` prints."""
        return {"passed": self.passed, "checks": [vars(check) for check in self.checks]}

    def _line(self) -> list[str]:
        failed = [check.name for check in self.checks if check.passed is False]
        return [f"failed: {', '.join(failed)}" if failed else f"{len(self.checks)} checks passed"]

    def _view(self) -> View:
        return *self.table(), []


@checked()
def verify(
    model: str | Path,
    data: str | Path | None = None,
    *,
    models: Sequence[str] = (),
    progress: bool | Progress = True,
    **loading: Unpack[LoadOptions],
) -> Verification:
    """Check a merge, a calibrated or distilled model, or an adapter merged into its base.

    The model must load with `from_pretrained`. Tensors that the recipe excludes must be those of the base. The answers
    must be finite, and closer to those of some fine-tuned model than the base's answers. If the model is an adapter
    merged into its base, its answers must equal those of base + adapter, run by PEFT. Generation must stop where that
    of every fine-tuned model stops.

    Args:
        model: The folder of the result.
        data: Prompts, as a data source; labels are not read. By default a few built-in ones.
        models: What the model was made of, if it has no `gradmerge.json`: fine-tuned models, or an adapter.
        progress: Show a progress bar; False for none; or an object that gets the progress in models.
        loading: The options of :class:`gradmerge.LoadOptions`. By default 16 rows of at most 128 tokens.

    Returns:
        The checks. ``passed`` says whether none failed.

    >>> verify("./merged").passed  # doctest: +SKIP
    True
    """
    from .. import tasks
    from ..tasks.model_files import folder_of
    from .model_checks import Parents, check_model

    options = tasks.complete(loading, verify)
    options = {**options, "limit": options["limit"] or ROWS}
    if options["dtype"] not in ("auto", "float32"):
        raise InputError(f"dtype {options['dtype']}: must be float32, the type of the comparison")
    parents = Parents.find(folder_of(str(model)), models)
    with shown(progress, "models") as bar:
        return Verification(check_model(str(model), None if data is None else str(data), parents, options, bar))
