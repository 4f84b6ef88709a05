"""What a merge costs, predicted from curvature or evaluated on data; previews over weights."""
