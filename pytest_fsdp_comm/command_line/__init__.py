"""The program ``fsdp-comm``: shows, compares and accepts snapshots, outside of any test.

It imports the pure rooms, and of `snapshots` only modules that do not import pytest: git starts the
program for every file.
"""
