"""Build a `ShardTree` that describes how FSDP1, FSDP2, DDP and DTensor have sharded a model."""

import importlib

from pytest_fsdp_comm import upstream

with upstream.private_names("a class or module that fsdp_tree reads"):
    importlib.import_module(f"{__name__}.capture")  # it imports the other modules of this package
