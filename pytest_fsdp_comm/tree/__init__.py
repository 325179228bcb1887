"""Represent how a model is sharded, compare sharded models, and find wrapping mistakes."""
