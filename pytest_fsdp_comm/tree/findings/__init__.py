"""Rules about how a model is wrapped; declare new rules in `rules`."""
