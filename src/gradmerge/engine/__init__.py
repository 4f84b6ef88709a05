"""A plan of what goes where, and running it: to a folder, or wherever a caller puts the blocks."""
