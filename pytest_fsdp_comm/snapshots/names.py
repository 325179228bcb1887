"""Convert between tests and the names of their snapshot files, without collisions."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import Final

SUFFIX: Final = ".comm"

PART: Final = "\x1f"
"""ASCII unit separator, which joins the parts of an assertion's name; no part contains it."""

# Maximum bytes of a test's name and of an index in a file name. File systems limit a file name to
# 255 bytes, which must include the variant, the suffix and whatever a temporary file's name adds.
_MAX_TEST: Final = 140
_MAX_INDEX: Final = 60
_DIGEST: Final = 16
_PLAIN: Final = re.compile(r"[A-Za-z0-9_\-\[\]=+,@ ]")
_VARIANT: Final = re.compile(r"\.(ws[0-9]+)(?=\.|$)")
ABOVE: Final = "%2E%2E"
"""Stands for ``..`` in the snapshot directory of a module outside pytest's root."""


def make_basename(test_name: str, variant: str, index: str | int) -> str:
    """Return ``<test>.<variant>[.<index>]``; omit an index of 0, and turn `PART` into a dot."""
    name = f"{escape_test_name(test_name)}.{variant}"
    label = str(index) if index != 0 else ""
    if not label:
        return name
    parts = ".".join(map(_escape_for_file_name, label.split(PART)))
    return f"{name}.{_shorten_with_digest(parts, _MAX_INDEX)}"


def escape_test_name(test_name: str) -> str:
    """Return the part of a file name that names the test, without the variant."""
    # Dots separate the parts of a file name, so escape dots, except the one after a class name.
    head, bracket, params = test_name.partition("[")
    written = ".".join(map(_escape_for_file_name, head.split("."))) + _escape_for_file_name(
        bracket + params
    )
    return _shorten_with_digest(written, _MAX_TEST)


def read_basename(name: str) -> tuple[str, str] | None:
    """Split a file's stem into the escaped test name and the variant (``ws4``).

    Returns None if it has no variant.
    """
    match = _VARIANT.search(name)
    return None if match is None else (name[: match.start()], match[1])


def strip_test_parameters(name: str) -> str:
    """Return ``TestClass.test_name``: a name from `escape_test_name` without its parameters."""
    return name.partition("[")[0]


def module_to_directory(module: Path, root: Path) -> Path:
    """Return a test module's directory in the snapshot directory; `root` is pytest's root."""
    if not module.is_relative_to(root):
        # Resolve symlinks only here, so that symlinks inside the project do not change file names.
        module, root = module.resolve(), root.resolve()
    plain = module.with_suffix("") if module.suffix == ".py" else module
    parts = Path(os.path.relpath(plain, root)).parts
    return Path(*(ABOVE if part == os.pardir else part for part in parts))


def directory_to_module(directory: Path, root: Path) -> Path:
    """Return the test module whose snapshots are in `directory`; reverses `module_to_directory`."""
    parts = (os.pardir if part == ABOVE else part for part in directory.parts)
    path = Path(os.path.normpath(root.joinpath(*parts)))
    # A test file that is not Python, such as a notebook, keeps its suffix in the directory's name.
    return path if path.is_file() else path.with_name(f"{path.name}.py")


def _escape_for_file_name(text: str) -> str:
    return "".join(
        character
        if _PLAIN.match(character)
        else "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
        for character in text
    )


def _shorten_with_digest(written: str, most: int) -> str:
    if len(written) <= most:
        return written
    digest = hashlib.sha256(written.encode()).hexdigest()[:_DIGEST]
    return f"{written[: most - _DIGEST - 1]}~{digest}"
