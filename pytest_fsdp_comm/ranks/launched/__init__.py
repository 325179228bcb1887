"""Ranks that torchrun or a scheduler started, each in a process of its own.

In comes such a process's session, out go the verdicts that rank 0 reports.
"""
