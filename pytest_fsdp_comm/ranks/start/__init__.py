"""Starts and ends the processes of ranks, and limits how many run at once."""
