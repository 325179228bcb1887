"""Recordings as values: events, profiles, their comparison, and the causes of a diff."""
