"""Simulates one rank of a job of any size, with tensors that have no memory."""

import importlib

from pytest_fsdp_comm import upstream

with upstream.private_names("a class or module that a simulation reads"):
    importlib.import_module(f"{__name__}.world")  # it imports the other modules of this package
