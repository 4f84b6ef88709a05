"""Whether checkpoints can be merged with one another."""
