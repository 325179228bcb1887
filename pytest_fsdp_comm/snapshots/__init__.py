"""Reviewed files: their names, their text, their comparison, and which of them no test needs."""
