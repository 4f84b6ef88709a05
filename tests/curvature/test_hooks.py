"""What formulas hand over is the same for whoever takes it: here, sums of outer products in the place of squares."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradmerge.curvature.hooks import Recorder
from gradmerge.curvature.kernels import OuterGradient, Term
from gradmerge.curvature.parameter_sum import ParameterSum
from gradmerge.curvature.per_example_gradients import formulas_for


class Factors(Recorder):
    """Σ xxᵀ and Σ yyᵀ over the tokens of all examples, of every matrix that is multiplied with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model, {p: ParameterSum(p) for p in model.parameters()})
        self.found: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def take(self, one: ParameterSum, term: Term) -> None:
        if isinstance(term, OuterGradient):
            x, y = term.x.flatten(0, 1), term.y.flatten(0, 1)
            self.found[one.parameter] = x.T @ x, y.T @ y


def test_another_recorder_takes_the_same_inputs_and_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    x, labels = torch.randn(2, 6, 4, dtype=torch.float64), torch.randint(0, 3, (12,))
    hidden = model[1](model[0](x))
    logits = model[2](hidden)
    (want,) = torch.autograd.grad(F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum"), logits)

    recorder = Factors(model)
    recorder.attach(formulas_for(module, model)[0] for module in model if list(module.parameters()))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with recorder.recording((x, labels.view(2, 6))):
        F.cross_entropy(model(x).flatten(0, 1), labels, reduction="sum").backward()
    recorder.hooks.close()

    for layer, seen in ((model[0], x), (model[2], hidden.detach())):
        assert torch.allclose(recorder.found[layer.weight][0], seen.flatten(0, 1).T @ seen.flatten(0, 1))
    assert torch.allclose(recorder.found[model[2].weight][1], want.flatten(0, 1).T @ want.flatten(0, 1))
