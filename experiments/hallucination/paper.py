"""What the paper reports (tab:toxicity_hallucinations, right half): Wizard of Wikipedia, scaling factor 1.0."""

from __future__ import annotations

TABLE = "tab:toxicity_hallucinations"

#: model → row → (BLEU, hallucination % by the critic, hallucination % as 1 − Q²)
NUMBERS: dict[str, dict[str, tuple[float, float, float]]] = {
    "FlanT5 250M": {
        "base": (17.3, 27.5, 11.7),
        "task-arithmetic": (18.2, 13.8, 7.4),
        "removal": (18.2, 12.8, 7.0),
    },
    "FlanT5 780M": {
        "base": (18.4, 31.5, 12.8),
        "task-arithmetic": (18.6, 11.8, 7.7),
        "removal": (18.0, 8.8, 5.0),
    },
}

#: δ of the gradient-matching removal in the paper's appendix.
DAMPING = 1e-10
