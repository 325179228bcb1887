"""How ranks come into being, and their end: forked, or as fresh processes, within bounds.

In comes a `wire.launch.Launch`, out go processes.
"""
