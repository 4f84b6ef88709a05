"""CPU time of `gradmerge --help`, against an interpreter that does nothing.

    python -m benchmarks.startup --json startup.json

The promise is less than 0.5 s. That the heavy imports stay out is a test; how long it takes is not.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from pathlib import Path


def cpu_seconds(*arguments: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of `gradmerge --help`.")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()
    runs = {"gradmerge --help": ["-m", "gradmerge", "--help"], "empty interpreter": ["-c", "pass"]}
    seconds = {name: [cpu_seconds(*words) for _ in range(options.repeats)] for name, words in runs.items()}
    for name, every in seconds.items():
        print(f"{name:18} median {statistics.median(every):.3f} s CPU, worst {max(every):.3f} s")
    if options.json:
        options.json.write_text(json.dumps(seconds, indent=2) + "\n")


if __name__ == "__main__":
    main()
