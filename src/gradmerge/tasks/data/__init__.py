"""Rows of data, which column is what, and labels that fit a model."""
