"""Watches torch: every collective, its owner, and how a model is sharded."""
