"""Runs the distributed tests of a pytest process, each on a rank set, and merges the results."""
