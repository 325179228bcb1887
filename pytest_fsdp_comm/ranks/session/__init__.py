"""Runs each distributed test of a pytest process on a set of ranks, and merges the results."""
