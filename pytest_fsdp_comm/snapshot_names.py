"""Names of snapshot files: readable, without collisions, and readable back."""

from __future__ import annotations

import hashlib
import re
from typing import Final

_MAX_LENGTH: Final = 200
"""File systems allow 255 bytes; temporary names and the extension need some."""
_PLAIN: Final = re.compile(r"[A-Za-z0-9_\-\[\]=+,@ ]")
_VARIANT: Final = re.compile(r"\.(ws\d+)(?=\.|$)")


def basename(test_name: str, variant: str, index: str | int) -> str:
    """The file name of an assertion, without extension.

    Args:
        test_name: ``TestClass.test_name[params]``.
        variant: ``ws4``, or ``ws1`` for a test that is not distributed.
        index: The assertion's name, or its number, of which 0 is left out.
    """
    # Dots separate the parts, so those of parameters are escaped; those of classes may stay.
    head, bracket, params = test_name.partition("[")
    parts = [".".join(map(_escape, head.split("."))) + _escape(bracket + params)]
    parts.append(variant)
    if isinstance(index, str):
        parts.append(_escape(index))
    elif index:
        parts.append(str(index))
    name = ".".join(parts)
    if len(name) <= _MAX_LENGTH:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    tail = "." + ".".join(parts[1:])
    return f"{parts[0][: _MAX_LENGTH - len(digest) - 1 - len(tail)]}~{digest}{tail}"[:250]


def _escape(text: str) -> str:
    return "".join(
        character
        if _PLAIN.match(character)
        else "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))
        for character in text
    )


def is_of_variant(stem: str, variant: str) -> bool:
    """Whether a file name without extension belongs to a variant."""
    found = _VARIANT.search(stem)
    return found is not None and found[1] == variant


def snapshot_name(stem: str) -> str:
    """What syrupy calls the snapshot in a file.

    syrupy finds the test of a snapshot by the identifiers at the name's beginning, up to the first
    other character: the variant and the assertion's name go into brackets, where they are none.
    """
    found = _VARIANT.search(stem)
    if found is None:
        return stem
    return f"{stem[: found.start()]}[{found[1]}]{stem[found.end() :]}"
