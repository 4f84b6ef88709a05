"""What the experiments share: stages that are kept, fine-tuning, tables and figures."""
