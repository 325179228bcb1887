"""How ranks come into being, and their end: forked, or as fresh processes, within bounds.

In comes a `wire.rank_set.RankSetSpec`, out go processes.
"""
