"""What the experiments share: their command line, stages and seeds, fine-tuning, tables and figures."""
