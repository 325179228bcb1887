"""How things are written: names of modules and their patterns, bytes, ranks, paths, JSON.

Plain values come in and text goes out, or the other way round.
"""
