"""What torch sends, watched while it does: one immutable event for each collective.

In comes a block of a test, out goes a `comm.events.Recording`. Knows torch; may know `comm`.
"""
