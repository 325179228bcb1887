"""Find mistakes in how a model is wrapped; add new rules to `rules`."""
