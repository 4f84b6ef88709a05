"""What the paper reports: figure "scaling factors" (`fig:scaling`), left panel, eight image tasks added to a ViT.

Accuracy in percent, averaged over the test sets of the eight tasks. Every task has the same weight α_t.
"""

from __future__ import annotations

WEIGHTS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

FIGURE = {
    "task-arithmetic": (46.1, 59.4, 65.2, 65.9, 60.8, 52.8, 44.4, 38.6, 34.2, 30.3, 26.5),
    "gradient-matching": (46.1, 58.7, 64.2, 65.3, 66.1, 66.4, 66.2, 65.4, 64.4, 63.6, 62.6),
}

#: The dashed line of the same panel. The two curves begin at 46.1, which should be the same model.
ZERO_SHOT = 44.95
