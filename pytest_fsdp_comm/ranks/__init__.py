"""A test on its ranks: started, watched, judged.

Top floor first: `launched`, `session`, `start`, `rank`, `hangs`, `wire`; no arrow goes up.
"""
