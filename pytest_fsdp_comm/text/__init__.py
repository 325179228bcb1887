"""How things are written: names of modules and their patterns, bytes, lists of ranks.

In come plain values, out goes text, or the other way round. Knows nothing but errors.
"""
