"""One pytest process's distributed tests: one set of ranks at a time, one verdict each.

In come items, out go reports. May know how ranks are started and what they send.
"""
