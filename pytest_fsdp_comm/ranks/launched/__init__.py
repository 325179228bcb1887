"""Ranks that torchrun or a scheduler started, each in a process of its own."""
