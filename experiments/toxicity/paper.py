"""What the paper reports: the left half of the table tab:toxicity_hallucinations."""

from __future__ import annotations

TABLE = "tab:toxicity_hallucinations"
#: What stands beside a model that the paper does not have.
NEAREST = "gpt2"
#: model → row → (100 · mean score, % of generations with a score of at least 0.2, perplexity on WikiText-103).
PAPER: dict[str, dict[str, tuple[float, float, float]]] = {
    "gpt2": {"base": (11.2, 15.4, 24.9), "task arithmetic": (9.8, 13.1, 30.3), "gradient matching": (9.6, 12.8, 26.9)},
    "EleutherAI/gpt-neo-1.3B": {
        "base": (11.9, 16.6, 12.6),
        "task arithmetic": (10.7, 14.5, 12.7),
        "gradient matching": (10.2, 14.0, 12.8),
    },
}
