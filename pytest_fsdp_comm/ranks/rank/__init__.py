"""What runs inside one rank: the whole pytest protocol of a test.

In comes a `wire.launch.Launch` and a rank, out go messages.
"""
