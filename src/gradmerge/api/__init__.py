"""Merging and what goes with it, from Python: the functions that gradmerge exports, and what the commands call.

Each module is imported where it is needed: a merge need not wait for reports and tasks.
"""
