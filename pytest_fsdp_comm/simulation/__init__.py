"""Runs the code of one rank of any number, with tensors that have no memory."""
