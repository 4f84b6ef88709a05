"""Merging adapters: adapters in, one adapter out."""
