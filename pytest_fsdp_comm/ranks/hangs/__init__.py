"""Finds out where ranks hang, and which rank waits for which."""
