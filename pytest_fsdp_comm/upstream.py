"""Errors that say that torch, pytest or a plugin moved a private name, and the versions read."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib import metadata
from typing import Any, Final

from pytest_fsdp_comm.errors import UpstreamChangedError

# Note [Private names]: every private name is used in a module that says so, has a contract test,
# and is looked up so that its absence becomes one of these errors.

# The versions whose source was read for the private names that are used here.
VERSIONS_READ: Final = {
    "pytest": "8.4 to 9.2",
    "pytest-rerunfailures": "16.7",
    "syrupy": "7.0",
    "torch": "2.7 to 2.15",
}

NEEDS_SYRUPY: Final = (
    "distributed tests and comm_snapshot need the plugin syrupy, which is not loaded: add -p syrupy"
)
_UPGRADE: Final = "upgrade pytest-fsdp-comm"
_RECORDER: Final = "the recorder relies on"


def missing_torch() -> str:
    """What to do where torch is not installed; empty where it is."""
    try:
        is_there = "torch" in sys.modules or importlib.util.find_spec("torch") is not None
    except ImportError:
        is_there = False
    if is_there:
        return ""
    return (
        f"torch is not installed for {sys.executable}, and distributed tests, comm_mode and "
        "fsdp_tree need it: install it (https://pytorch.org/get-started/locally), or run pytest "
        "with the Python that has it"
    )


def look_up(module: str, name: str, use: str = _RECORDER) -> Any:
    """Return a name of a module of torch, or raise `moved_error` if it no longer exists."""
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise moved_error("torch", f"{module}.{name}", use)
    return found


def moved_error(
    package: str, name: str, use: str = _RECORDER, *, remedy: str = _UPGRADE
) -> UpstreamChangedError:
    """Make the error about a name that no longer exists; `use` is read after "which"."""
    return _changed(package, f"no longer has {name}, which {use}", remedy)


def misread_error(package: str, what: str, problem: object) -> UpstreamChangedError:
    """Make the error about a name within `what`, read after "moved a private name of"."""
    return _changed(package, f"moved a private name of {what}: {problem}", _UPGRADE)


def _changed(package: str, what: str, remedy: str) -> UpstreamChangedError:
    try:
        installed = f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        installed = package
    versions = VERSIONS_READ[package]
    those = "one of these" if " to " in versions else "it"
    return UpstreamChangedError(
        f"{installed} {what}; pytest-fsdp-comm was written for {package} {versions}: use {those}, "
        f"or {remedy}"
    )
