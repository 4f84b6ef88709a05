"""Model cards (README.md) and records (gradmerge.json) of the folders that gradmerge writes."""
