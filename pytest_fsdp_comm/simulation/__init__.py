"""Runs the code of one rank of any number, with tensors that have no memory.

`world.simulated` is entered around a test and its fixtures; `values.py` knows which values there
are.
"""
