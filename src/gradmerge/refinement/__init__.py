"""Refinement: from a merge on towards the jointly trained model, by the gradients of every task on a few rows."""
