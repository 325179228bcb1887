"""Runs the distributed tests of a pytest process: one rank set at a time, one verdict each."""
