"""Rules about the wrapping of a model: a new one is a declaration in `rules`."""
