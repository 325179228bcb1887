"""Find the shortest exact explanation of a diff: model-wide steps, then leftover rows."""
