from __future__ import annotations

from typing import Annotated, Literal

from torch import Tensor

from gradmerge.rules import METHODS, Help, rule


def test_a_rule_is_read_from_its_signature() -> None:
    @rule("mine", matching_form=("1", "I", "0"), reference="none", when={"prior": "careful"})
    def mine(
        base: Tensor,
        prior: Tensor | None = None,
        *,
        density: Annotated[float, Help("how much", gt=0, le=1)],
        mode: Annotated[Literal["a", "b"], Help("which")] = "a",
        careful: Annotated[bool, Help("look twice")] = False,
    ) -> Tensor:
        """What it does.

        And more.
        """
        return base

    assert mine.inputs == ("base", "prior")
    assert [o.name for o in mine.options] == ["density", "mode", "careful"]
    assert mine.options[0].required
    assert mine.options[0].kind == "number, 0 < x ≤ 1"
    assert mine.options[1].kind == "a | b"
    assert [o.kind for o in METHODS["removal"].options] == ["true | false", "number, 0 ≤ x; or none"]
    assert mine.summary == "What it does."
    assert mine.needs({"careful": False}) == {"base"}
    assert mine.needs({"careful": True}) == {"base", "prior"}
