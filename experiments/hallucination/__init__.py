"""Hallucinations taken out of a dialogue model: the right half of the paper's removal table."""
