"""Says that torch, pytest or a plugin has moved a private name; the list of the versions read.

Every private name is used in a module that says so, has a contract test, and is looked up so that
its absence becomes one of these errors.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any, Final

from pytest_fsdp_comm.errors import UpstreamChangedError

VERSIONS_READ: Final = {
    "hypothesis": "6.170",
    "pytest": "8.4 to 9.2",
    "pytest-rerunfailures": "16.7",
    "syrupy": "7.0",
    "torch": "2.6 to 2.15",
}
"""The versions whose source was read for the private names that are used here."""


def look_up(package: str, module: str, name: str, use: str) -> Any:
    """A name of a module.

    Args:
        package: As `VERSIONS_READ` has it.
        module: Where it is, as one would import it.
        name: What is needed.
        use: What relies on it, as for `moved`.

    Raises:
        UpstreamChangedError: It no longer exists.
    """
    found = getattr(importlib.import_module(module), name, None)
    if found is None:
        raise moved(package, f"{module}.{name}", use)
    return found


def moved(
    package: str, name: str, use: str, *, remedy: str = "upgrade pytest-fsdp-comm"
) -> UpstreamChangedError:
    """An error about a name that no longer exists.

    Args:
        package: As `VERSIONS_READ` has it.
        name: What is missing, as one would import it.
        use: What relies on it, read after "which": ``the recorder relies on``.
        remedy: What helps besides another version of the package.
    """
    return UpstreamChangedError(
        f"{_installed(package)} no longer has {name}, which {use}; {_read_against(package, remedy)}"
    )


def misread(package: str, what: str, problem: object) -> UpstreamChangedError:
    """An error about a name that is missing within something larger.

    Args:
        package: As `VERSIONS_READ` has it.
        what: What was read, read after "moved a private name of".
        problem: What Python said.
    """
    return UpstreamChangedError(
        f"{_installed(package)} moved a private name of {what}: {problem}; "
        f"{_read_against(package, 'upgrade pytest-fsdp-comm')}"
    )


def _installed(package: str) -> str:
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def _read_against(package: str, remedy: str) -> str:
    versions = VERSIONS_READ[package]
    those = "one of these" if " to " in versions else "it"
    return f"pytest-fsdp-comm was written for {package} {versions}: use {those}, or {remedy}"
