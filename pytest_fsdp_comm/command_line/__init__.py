"""The program ``fsdp-comm``: shows, compares, accepts and audits snapshots."""
# Of `snapshots` it imports what imports no pytest, as git starts the program for every file.
