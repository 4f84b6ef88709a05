"""From a merge towards joint training with a few rows per task: refinement, on sentiment and on images."""
