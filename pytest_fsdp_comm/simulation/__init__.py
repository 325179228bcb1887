"""Simulates one rank of a job of any size, with tensors that have no memory."""
