"""Attribute collectives to modules, phases and units."""
