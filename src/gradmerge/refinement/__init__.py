"""Removal without a fine-tuned model: steps along influence functions."""
