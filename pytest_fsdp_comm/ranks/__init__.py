"""Runs one test on many ranks and gives one verdict."""
