"""Numbered layers of a model: their names, their config, and stacks of layers of several models."""
