"""Merging on a Ray cluster."""
