"""The experiments of the paper that gradmerge is built on, each with one command: ``python -m experiments.sentiment``.

All have the same files: ``__main__`` (the command line), ``settings``, ``data``, ``run`` (what the seeds share, and one
seed stage by stage), ``report`` (tables and figures, from results.json alone) and ``paper`` (the paper's numbers). The
others are the experiment's own.
"""
