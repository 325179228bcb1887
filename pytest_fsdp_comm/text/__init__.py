"""Read and write texts: module names and their patterns, bytes, rank lists, paths and JSON."""
