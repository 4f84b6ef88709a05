"""What the paper reports (Daheim et al., ICLR 2024), by the name of its table or figure. Accuracies are percentages."""

from __future__ import annotations

#: Table sentiment_analysis and table hessians: RoBERTa-base. Columns are IMDB, Yelp, Rotten Tomatoes, SST-2, Amazon,
#: their average, and the accuracy over all predictions ("true average"). The table sentiment_analysis_mismatch_only
#: repeats two rows of it.
ROBERTA: dict[str, tuple[float, ...]] = {
    "all-data": (94.8, 97.6, 91.2, 94.7, 96.9, 95.0, 96.8),
    "average": (94.4, 97.0, 89.1, 93.6, 96.2, 94.1, 96.1),
    "fisher-averaging-mean": (94.5, 97.0, 89.6, 93.9, 96.1, 94.3, 96.1),
    "fisher-averaging-sum": (94.8, 97.2, 89.9, 93.1, 96.6, 94.3, 96.5),
    "regmean": (94.7, 97.3, 90.0, 94.0, 96.5, 94.5, 96.4),
    "ties": (94.0, 97.3, 89.6, 93.7, 96.6, 94.2, 96.5),
    "task-arithmetic": (90.5, 95.6, 86.4, 91.6, 94.9, 91.8, 94.7),
    "task-arithmetic tuned on test": (94.3, 97.2, 89.6, 94.5, 96.4, 94.4, 96.3),
    "gradient-matching-identity": (94.6, 97.3, 89.5, 93.3, 96.6, 94.3, 96.5),
    "gradient-matching-mean": (94.4, 97.2, 90.2, 94.6, 96.3, 94.5, 96.3),
    "gradient-matching-sum": (94.7, 97.3, 90.2, 93.7, 96.7, 94.5, 96.6),
}

#: Table t5: T5 v1.1 base.
T5: dict[str, tuple[float, ...]] = {
    "all-data": (94.9, 98.0, 91.0, 94.5, 97.2, 95.1, 97.1),
    "task-arithmetic": (90.5, 97.0, 87.9, 92.3, 95.5, 92.6, 95.3),
    "gradient-matching-sum": (93.6, 97.5, 90.7, 94.6, 96.5, 94.6, 96.4),
}

#: Figure scaling_factors_fig, right: accuracy averaged over the data sets, at the weights 0, 0.1, … 1.
SCALING_WEIGHTS = tuple(n / 10 for n in range(11))
SCALING: dict[str, tuple[float, ...]] = {
    "task-arithmetic": (92.2, 93.5, 94.1, 94.3, 94.3, 94.3, 93.9, 93.6, 93.2, 92.7, 91.8),
    "gradient-matching": (92.2, 93.9, 94.3, 94.4, 94.5, 94.5, 94.5, 94.5, 94.4, 94.5, 94.5),
}

#: Figure mismatch, right: (gradient mismatch, difference in test error to the all-data model in points). The figure
#: numbers its tasks 1 to 5 and does not name them: the differences in the table sentiment_analysis are those of the
#: alphabetical order.
MISMATCH: dict[str, dict[str, tuple[float, float]]] = {
    "task-arithmetic": {
        "amazon": (0.1487, 2.1),
        "imdb": (0.2831, 4.4),
        "rotten_tomatoes": (0.3742, 5.2),
        "sst2": (0.4061, 3.0),
        "yelp": (0.2832, 2.0),
    },
    "gradient-matching": {
        "amazon": (0.0357, 0.2),
        "imdb": (0.0643, 0.1),
        "rotten_tomatoes": (0.1161, 1.0),
        "sst2": (0.0695, 1.0),
        "yelp": (0.0808, 0.3),
    },
}
