"""One pytest process's distributed tests: one rank set at a time, one verdict each.

In come items, out go reports. May know how ranks are started and what they send.
"""
