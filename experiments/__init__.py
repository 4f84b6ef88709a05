"""The experiments of the paper that gradmerge is built on, each with one command: ``python -m experiments.sentiment --help``."""
