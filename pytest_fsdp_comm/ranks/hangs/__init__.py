"""Finds out where ranks hang, and which ranks are waiting for which."""
