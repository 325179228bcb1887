"""Starts and ends the processes of a `wire.rank_set.RankSetSpec`, within bounds."""
