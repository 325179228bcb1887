"""Names of snapshot files: readable, without collisions, and readable back."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

SUFFIX: Final = ".comm"

PART: Final = "\x1f"
"""Joins the parts of an assertion's name where it has several: no name holds a unit separator."""

# File systems allow 255 bytes for a name; the suffix and an unfinished write need some of them.
_MAX_TEST: Final = 140
_MAX_INDEX: Final = 60
_DIGEST: Final = 16
_PLAIN: Final = re.compile(r"[A-Za-z0-9_\-\[\]=+,@ ]")
_VARIANT: Final = re.compile(r"\.(ws[0-9]+)(?=\.|$)")
ABOVE: Final = "%2E%2E"
"""Written for ``..`` in the directory of a module."""


def basename(test_name: str, variant: str, index: str | int) -> str:
    """``<test>.<variant>[.<index>]``; `PART` separates what the index has, and 0 is left out."""
    name = f"{written_test(test_name)}.{variant}"
    given = str(index) if index != 0 else ""
    if not given:
        return name
    return f"{name}.{_bounded('.'.join(map(_escape, given.split(PART))), _MAX_INDEX)}"


def written_test(test_name: str) -> str:
    """The part of a file name that names the test, without a number of ranks."""
    # Dots separate the parts, so those of parameters are escaped; those of classes may stay.
    head, bracket, params = test_name.partition("[")
    written = ".".join(map(_escape, head.split("."))) + _escape(bracket + params)
    return _bounded(written, _MAX_TEST)


def read_basename(name: str) -> tuple[str, str] | None:
    """Test (as `written_test` has it) and variant of a name without suffix; None if not ours."""
    found = _VARIANT.search(name)
    return None if found is None else (name[: found.start()], found[1])


def function_of(name: str) -> str:
    """``TestClass.test_name`` of a test as `written_test` writes it: without parameters."""
    return name.partition("[")[0]


def written_module(module: Path, root: Path) -> Path:
    """The directory of a module's snapshots below that of all; `root` is pytest's root."""
    if not module.is_relative_to(root):
        # A link may have led to the project, or to its tests; links below have names of their own.
        module, root = module.resolve(), root.resolve()
    plain = module.with_suffix("") if module.suffix == ".py" else module
    parts = Path(os.path.relpath(plain, root)).parts
    return Path(*(ABOVE if part == os.pardir else part for part in parts))


def named_module(directory: Path, root: Path) -> Path:
    """The inverse of `written_module`."""
    parts = (os.pardir if part == ABOVE else part for part in directory.parts)
    path = Path(os.path.normpath(root.joinpath(*parts)))
    # Of what is not Python, such as a notebook, the name is whole.
    return path if path.is_file() else path.with_name(f"{path.name}.py")


def _escape(text: str) -> str:
    return "".join(
        character
        if _PLAIN.match(character)
        else "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
        for character in text
    )


def _bounded(written: str, most: int) -> str:
    if len(written) <= most:
        return written
    digest = hashlib.sha256(written.encode()).hexdigest()[:_DIGEST]
    return f"{written[: most - _DIGEST - 1]}~{digest}"
