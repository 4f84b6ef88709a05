"""Toxicity taken out of a language model: the left half of the paper's table of removals."""
