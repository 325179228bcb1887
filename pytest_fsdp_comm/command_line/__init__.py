"""The program ``fsdp-comm``: shows, compares, accepts and audits snapshots, outside of any test.

Files, revisions of git and answers on a terminal come in; text and exit statuses go out. It imports
the pure rooms, and of `snapshots` what imports no pytest: git starts the program for every file.
"""
