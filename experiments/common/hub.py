"""What is known of the models and data sets of the Hub that the full scale takes, and from which page it is known.

The pages were read as they were stored by others, some years old, and nothing here was downloaded. The dry run and the
documentation show it; a test holds it against what the experiments ask for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_HUB = "https://huggingface.co/"


@dataclass(frozen=True)
class Known:
    """Of one model or data set. Rows with a ~ are rounded there; sizes are of the files that are fetched."""

    source: str
    """The page, below the Hub's address where it is no address itself; empty where none was found."""
    size: str = ""
    configuration: str = ""
    columns: tuple[str, ...] = ()
    rows: Mapping[str, int] = field(default_factory=dict)
    note: str = ""

    @property
    def page(self) -> str:
        return self.source if self.source.startswith("https:") or not self.source else _HUB + self.source


#: Of a data set that says nothing of its columns on the page found.
_UNSEEN = "columns not on the page"

DATA: dict[str, Known] = {
    "stanfordnlp/imdb": Known(
        "datasets/stanfordnlp/imdb/viewer/plain_text/train?p=7",
        configuration="plain_text",
        columns=("text", "label"),
        rows={"train": 25_000, "test": 25_000},
        note="rows are rounded to thousands; columns as of a copy, barto17/imdb; sorted by label",
    ),
    "fancyzhx/yelp_polarity": Known(
        "datasets/fancyzhx/yelp_polarity/blob/refs%2Fpr%2F8/README.md?code=true",
        "166 MB",
        "plain_text",
        ("text", "label"),
        {"train": 560_000, "test": 38_000},
    ),
    "cornell-movie-review-data/rotten_tomatoes": Known(
        "https://tensorflow.org/datasets/community_catalog/huggingface/rotten_tomatoes",
        "0.9 MB",
        "default",
        ("text", "label"),
        {"train": 8_530, "validation": 1_066, "test": 1_066},
        "under its old name, rotten_tomatoes; the new one's viewer has the same rows",
    ),
    "stanfordnlp/sst2": Known(
        "datasets/stanfordnlp/sst2/blob/8d51e7e4887a4caaa95b3fbebbf53c0490b58bbb/README.md?code=true",
        "3.3 MB",
        "default",
        ("sentence", "label"),
        {"train": 67_349, "validation": 872, "test": 1_821},
    ),
    "fancyzhx/amazon_polarity": Known(
        "datasets/amazon_polarity/blob/main/README.md",
        "1.1 GB",
        "amazon_polarity",
        ("title", "content", "label"),
        {"train": 3_600_000, "test": 400_000},
        "under its old name, amazon_polarity",
    ),
    "Salesforce/wikitext": Known(
        "datasets/Salesforce/wikitext/tree/1598c59c386ed177a3440b87d906cea25b07c288/wikitext-103-raw-v1",
        "315 MB",
        "wikitext-103-raw-v1",
        rows={},
        note=f"its viewer has ~1.8 M, 3.76 k and 4.36 k rows; {_UNSEEN}: `text` is asked for",
    ),
    "google/civil_comments": Known(
        "datasets/google/civil_comments/raw/994595bdffb914eb2891c903a8552b3bd4c69526/README.md",
        "422 MB",
        "default",
        ("text", "toxicity"),
        {"train": 1_804_874, "validation": 97_320, "test": 97_320},
    ),
    "allenai/real-toxicity-prompts": Known(
        "datasets/allenai/real-toxicity-prompts/tree/main",
        "68 MB",
        "default",
        ("prompt",),
        note="one file, prompts.jsonl; `prompt` with `text` and `toxicity` as of a copy, "
        "Leogrin/real-toxicity-prompts_first_5K",
    ),
    "tanganke/stanford_cars": Known(
        "datasets/tanganke/stanford_cars/viewer/default/train?p=4",
        "6.0 GB",
        "default",
        rows={"train": 8_140, "test": 8_040},
        note=f"rows are rounded to tens, the size is of all nine splits, seven of which are not read; {_UNSEEN}",
    ),
    "tanganke/dtd": Known("tanganke", note=f"~5.64 k rows in all; {_UNSEEN}, nor are splits", configuration="default"),
    "tanganke/eurosat": Known(
        "datasets/tanganke/eurosat/viewer/",
        configuration="default",
        columns=("image", "label"),
        note="~43.2 k rows in all, with splits that are not read",
    ),
    "tanganke/gtsrb": Known(
        "datasets/tanganke/gtsrb/commit/99cc476919d9f7a3b55442e0c347281bdec70445",
        configuration="default",
        rows={"train": 26_640, "test": 12_630},
        note=_UNSEEN,
    ),
    "ylecun/mnist": Known(
        "datasets/ylecun/mnist/raw/refs%2Fpr%2F2/mnist.py",
        configuration="mnist",
        columns=("image", "label"),
        rows={"train": 60_000, "test": 10_000},
        note="a script of before it was converted; columns as of its copies",
    ),
    "tanganke/resisc45": Known(
        "datasets/tanganke/resisc45/viewer/",
        configuration="default",
        rows={"train": 18_900, "test": 6_300},
        note=f"rows are rounded to hundreds; {_UNSEEN}",
    ),
    "tanganke/sun397": Known(
        "datasets/tanganke/sun397/viewer/default/train?p=198",
        "about 14.6 GB",
        "default",
        rows={"train": 19_850, "test": 19_850},
        note=f"~19.9 k rows each there, 19,850 in the original; the size is twice that of a copy's train; {_UNSEEN}",
    ),
    "ufldl-stanford/svhn": Known(
        "datasets/ufldl-stanford/svhn/viewer/cropped_digits/train?p=730",
        configuration="cropped_digits",
        rows={"train": 73_257, "test": 26_032},
        note=f"~73.3 k and ~26 k there, exact in the catalogue of TensorFlow; the split extra is not read; {_UNSEEN}",
    ),
}

MODELS: dict[str, Known] = {
    "FacebookAI/roberta-base": Known("FacebookAI/roberta-base/tree/refs%2Fpr%2F7", "499 MB"),
    "google/t5-v1_1-base": Known(
        "google/t5-v1_1-base/tree/refs%2Fpr%2F1", "990 MB", note="safetensors in a pull request only; else a .bin"
    ),
    "openai/clip-vit-base-patch32": Known(
        "timm/vit_base_patch32_clip_224.openai/tree/ab5b8ef490e86faa07d3523926b842c765de1de5",
        "605 MB",
        note="the page of its own files was not found: the size is that of the same weights elsewhere",
    ),
    "gpt2": Known("", note="no page of its files was found"),
    "EleutherAI/gpt-neo-1.3B": Known("EleutherAI/gpt-neo-1.3B/tree/8282180b53cba30a1575e49de1530019e5931739", "5.3 GB"),
    "unitary/toxic-bert": Known("unitary/toxic-bert/tree/refs%2Fpr%2F5", "438 MB"),
    "google/flan-t5-base": Known("google/flan-t5-base/tree/main", "990 MB"),
    "google/flan-t5-large": Known("", note="no page of its files was found"),
    "McGill-NLP/roberta-large-faithcritic": Known(
        "McGill-NLP/roberta-large-faithcritic/tree/main", "1.4 GB", note="a .bin; safetensors in a pull request only"
    ),
}


def data_set(place: str) -> Known | None:
    """Of a data set as it is asked for: ``owner/name``, and perhaps ``/configuration``."""
    return DATA.get("/".join(place.split("/")[:2]))
