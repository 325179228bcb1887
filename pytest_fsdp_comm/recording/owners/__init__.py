"""Whose a collective is: the module, phase and unit that it serves."""
