"""Explain a diff exactly, in few lines: changes to many modules first, then leftover rows."""
