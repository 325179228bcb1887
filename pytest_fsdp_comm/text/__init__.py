"""How things are written: names of modules and their patterns, bytes, ranks, paths, JSON."""
