"""How things are written: names of modules and their patterns, bytes, ranks, paths, JSON.

In come plain values, out goes text, or the other way round. May know errors alone.
"""
