"""How the layers of a model are named, configured and stacked."""
