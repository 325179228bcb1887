"""Errors about missing packages, and about private names that a package no longer has."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from contextlib import suppress
from importlib import metadata
from typing import Any, Final

from pytest_fsdp_comm.errors import UpstreamChangedError

# Docstrings and comments say where private names of other packages are used, and a contract test
# covers each name. If a name is missing, the code that needs it raises one of the errors below.

# The versions of each package in which its private names were checked.
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
    """Return an error message if torch is not installed, else an empty string."""
    with suppress(ImportError):
        if "torch" in sys.modules or importlib.util.find_spec("torch"):
            return ""
    return (
        f"torch is not installed for {sys.executable}, and distributed tests, comm_mode and "
        "fsdp_tree need it: install it (https://pytorch.org/get-started/locally), or run pytest "
        "with a Python that has it"
    )


def look_up(module: str, name: str, use: str = _RECORDER) -> Any:
    """Return an attribute of a torch module, or raise `moved_error` if it no longer exists."""
    attribute = getattr(importlib.import_module(module), name, None)
    if attribute is None:
        raise moved_error("torch", f"{module}.{name}", use)
    return attribute


def moved_error(
    package: str, name: str, use: str = _RECORDER, *, remedy: str = _UPGRADE
) -> UpstreamChangedError:
    """Create the error for a private name that no longer exists; `use` completes "which ..."."""
    return _changed(package, f"no longer has {name}, which {use}", remedy)


def misread_error(package: str, subject: str, problem: object) -> UpstreamChangedError:
    """Create the error for a private name of `subject` that no longer works as before."""
    return _changed(package, f"changed a private name of {subject} ({problem})", _UPGRADE)


def _changed(package: str, change: str, remedy: str) -> UpstreamChangedError:
    try:
        installed = f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        installed = package
    versions = VERSIONS_READ[package]
    supported = "one of these versions" if " to " in versions else "that version"
    return UpstreamChangedError(
        f"{installed} {change}; pytest-fsdp-comm was written for {package} {versions}: use "
        f"{supported}, or {remedy}"
    )
