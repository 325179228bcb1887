"""Names of snapshot files: readable, without collisions, and readable back."""

from __future__ import annotations

import glob
import hashlib
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
_IS_VARIANT: Final = re.compile(r"ws[0-9]+")
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
    written = ".".join(map(_escape_segment, head.split("."))) + _escape(bracket + params)
    return _bounded(written, _MAX_TEST)


def read_basename(name: str) -> tuple[str, str] | None:
    """Test (as `written_test` has it) and variant of a name without suffix; None if not ours."""
    found = _VARIANT.search(name)
    return None if found is None else (name[: found.start()], found[1])


def function_of(name: str) -> str:
    """``TestClass.test_name`` of a test as `written_test` writes it: without parameters."""
    return name.partition("[")[0]


def written_module(module: Path, anchor: Path) -> Path:
    """The directory of a module's snapshots, relative to that of all; both paths are absolute."""
    above = 0
    while (relative := _below(module, anchor)) is None:
        anchor = anchor.resolve().parent
        above += 1
    plain = relative.with_suffix("") if relative.suffix == ".py" else relative
    return Path(*[ABOVE] * above, plain)


def _below(module: Path, anchor: Path) -> Path | None:
    if module.is_relative_to(anchor):
        return module.relative_to(anchor)
    # A link may have led to the project, or to its tests; links below it have names of their own.
    real = anchor.resolve()
    for parent in reversed(module.parents):
        if parent.resolve().is_relative_to(real):
            return parent.resolve().relative_to(real) / module.relative_to(parent)
    return None


def named_module(directory: Path, anchor: Path) -> Path | None:
    """The inverse of `written_module`; None for what is no ``.py`` file below the anchor."""
    if ABOVE in directory.parts or not directory.parts:
        return None
    return anchor / directory.with_name(f"{directory.name}.py")


def module_exists(directory: Path, anchor: Path) -> bool:
    """Whether the module of snapshots may be there; arguments as for `named_module`."""
    module = named_module(directory, anchor)
    if module is None or (anchor / directory).is_file():
        return True
    # Any other file of that name may hold the tests now: a notebook, a compiled module.
    return any(module.parent.glob(f"{glob.escape(module.stem)}.*"))


def _escape_segment(text: str) -> str:
    escaped = _escape(text)
    # A test with the name of a variant must not be read as one.
    return f"%{ord('w'):02X}{escaped[1:]}" if _IS_VARIANT.fullmatch(escaped) else escaped


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
