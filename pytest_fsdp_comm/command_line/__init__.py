"""The program ``fsdp-comm``: show, compare and accept snapshots without running tests."""
