"""Starts and ends the processes of a `wire.rank_set.RankSetSpec`, within bounds.

In come rank sets, out go process ids and exit statuses.
"""
