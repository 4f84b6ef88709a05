"""mergekit's recipes, translated to recipes of gradmerge."""
