"""Starts and ends the processes of ranks, as many as there are slots for."""
