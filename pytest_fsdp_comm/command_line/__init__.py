"""The program ``fsdp-comm``: shows, compares and accepts snapshots, outside of any test."""
