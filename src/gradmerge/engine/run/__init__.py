"""Running a plan, from the first block to the finished folder."""
