"""`python -m experiments.vision`"""

from ..common.driver import run_program
from .run import EXPERIMENT

if __name__ == "__main__":
    raise SystemExit(run_program(EXPERIMENT))
