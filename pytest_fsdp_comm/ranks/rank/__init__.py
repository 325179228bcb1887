"""What runs inside one rank: the whole pytest protocol of a test.

In comes a `wire.rank_set.RankSetSpec` and a rank, out go messages.
"""
