"""gradmerge studio as a Hugging Face Space: the same page, without the buttons that write.

Put this file and requirements.txt into a Space with the Gradio SDK. As it is, it makes the demonstration when the Space
starts (a minute or two) and shows that. For your own merge, put recipe.yml and some rows of data beside this file, and
set JOBS to them; models are folders of the Space, or ids of the Hub.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gradmerge.studio import serve

#: Title → recipe and data of its tasks, such as {"Reviews": ("recipe.yml", {"yelp": "yelp.jsonl"})}.
#: The demonstration brings its own data.
JOBS = {
    "Merge three tasks": ("demo/recipes/gradient-matching.yml", {}),
    "Take tilted out again": ("demo/recipes/removal.yml", {}),
}


def main() -> None:
    if any(recipe.startswith("demo/") for recipe, _ in JOBS.values()) and not Path("demo/results.md").exists():
        subprocess.run([sys.executable, "-m", "gradmerge", "demo", "-o", "demo", "--quiet"], check=True)
    # A Space looks for the page at this port, on all addresses; read_only lets visitors write nothing.
    serve(JOBS, host="0.0.0.0", port=7860, read_only=True, batch_size=64)


if __name__ == "__main__":
    main()
