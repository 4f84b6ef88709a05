"""What people read afterwards: the model card, tables, plots."""
