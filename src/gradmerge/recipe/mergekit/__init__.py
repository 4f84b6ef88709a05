"""Read mergekit recipes as gradmerge recipes."""
