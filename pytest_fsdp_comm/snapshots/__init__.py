"""Snapshot files: their names, their format, their comparison, and files that no test uses."""
