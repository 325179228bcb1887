"""Communication regression tests for PyTorch FSDP. Importing this package imports no torch."""
