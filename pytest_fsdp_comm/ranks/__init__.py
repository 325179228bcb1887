"""Runs a test on its ranks: starts them, supervises them, and merges their results."""
