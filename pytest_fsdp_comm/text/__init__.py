"""Text formats: module names and their patterns, bytes, rank lists, paths, JSON."""
