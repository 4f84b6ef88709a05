"""Eight image tasks added to a pre-trained vision transformer, over the weight of the tasks."""
