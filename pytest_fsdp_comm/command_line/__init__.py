"""The program ``fsdp-comm``: shows, compares, accepts and audits snapshots, outside of any test.

In come files, revisions of git and answers on a terminal, out go text and exit statuses. May know
the pure rooms, and of `snapshots` what imports no pytest: git starts the program for every file.
"""
