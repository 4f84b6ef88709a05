"""Ways to remove a data set from a language model, compared with the model that was retrained without it."""
