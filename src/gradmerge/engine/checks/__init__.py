"""Checks of a plan before the merge: damping, step size, coefficients."""
