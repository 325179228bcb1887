"""Represent recordings as immutable values, compare them, and find the causes of a diff."""
