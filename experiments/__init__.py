"""The experiments of the paper that gradmerge is built on, each with one command: ``python -m experiments.sentiment``.

Each is a folder with ``settings``, ``run`` (one seed, and the ``EXPERIMENT`` that declares it) and ``report`` (tables
and figures, from results.json alone).
"""
