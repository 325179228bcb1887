"""Rules about the wrapping of a model; declare a new one in `rules`."""
