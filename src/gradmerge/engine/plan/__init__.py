"""The plan of a merge: what happens to each tensor."""
