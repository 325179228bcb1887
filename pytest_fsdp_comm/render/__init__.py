"""Turns values and changes into text, HTML and traces."""
