"""Errors about missing packages, and about private names that a package no longer has."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from pytest_fsdp_comm.errors import UpstreamChangedError

# Note [Private names]
# A private name may be missing from a class, a module, or only from a few objects. The code that
# uses a private name of torch therefore reads it like any other name, inside a block of
# `private_names`: there is one around each recording, each phase of a test on a rank, each
# simulation, each captured tree, and the imports of a package such as `sharding`. The block turns
# the AttributeError or ImportError into an error that lists the versions checked. Names that are
# read elsewhere, or that are missing without an error, are looked up with `look_up`. Some names
# have a fallback instead; tests/recording/test_private_names.py checks the error or the fallback.

_PACKAGE: Final = f"{Path(__file__).parent}/"

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


def explain_missing_torch() -> str:
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
    """Return a name of a torch module, which may be dotted; raise `moved_error` if it is gone."""
    try:
        return attrgetter(name)(importlib.import_module(module))
    except (AttributeError, ImportError) as missing:
        raise moved_error("torch", f"{module}.{name}", use) from missing


@contextmanager
def private_names(reader: str) -> Iterator[None]:
    """Turn an error about a missing name into an UpstreamChangedError. See Note [Private names].

    Args:
        reader: A class, module or API of torch, and what reads its names, for the error.
    """
    try:
        yield
    except (AttributeError, ImportError) as missing:
        if _is_torch_name_read_by_us(missing):
            raise misread_error("torch", reader, missing) from missing
        raise


def _is_torch_name_read_by_us(missing: AttributeError | ImportError) -> bool:
    """Whether this package, not a user or torch itself, has read a name that torch lacks."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(missing.__traceback__)]
    while codes and codes[-1].co_name == "__getattr__":  # of nn.Module, torch.ops and FSDP1
        codes.pop()
    if not codes or not codes[-1].co_filename.startswith(_PACKAGE):
        return False
    owners = [str(missing.name)]
    if isinstance(missing, AttributeError):
        holder: Any = missing.obj
        kind = holder if isinstance(holder, type) else type(holder)
        owners = [base.__module__ for base in kind.__mro__]
        if issubclass(kind, ModuleType):
            owners = [holder.__name__]
    return any(owner.partition(".")[0] == "torch" for owner in owners)


def moved_error(
    package: str, name: str, use: str = _RECORDER, *, remedy: str = _UPGRADE
) -> UpstreamChangedError:
    """Create the error for a private name that no longer exists; `use` completes "which ..."."""
    return _make_changed_error(package, f"no longer has {name}, which {use}", remedy)


def misread_error(package: str, subject: str, problem: object) -> UpstreamChangedError:
    """Create the error for a private name of `subject` that no longer works as before."""
    return _make_changed_error(
        package, f"changed a private name of {subject} ({problem})", _UPGRADE
    )


def _make_changed_error(package: str, change: str, remedy: str) -> UpstreamChangedError:
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
