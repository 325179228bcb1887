"""Names of modules as the search compares them: by their words, whatever their numbers."""

from __future__ import annotations

from functools import lru_cache


@lru_cache(maxsize=100_000)
def template(fqn: str) -> str:
    """The name with ``*`` for each number: ``layers.*.experts.*`` of ``layers.3.experts.7``."""
    # "+" joins the modules of one unit.
    return "+".join(
        ".".join("*" if segment.isdecimal() else segment for segment in part.split("."))
        for part in fqn.split("+")
    )


@lru_cache(maxsize=100_000)
def replace_prefix(fqn: str, old: str, new: str) -> str:
    """The name with another beginning, in each module of a unit that has it.

    Both are whole segments with ``*`` for numbers in order; an empty `old` begins all names.
    """
    if "+" in fqn:
        return "+".join(replace_prefix(part, old, new) for part in fqn.split("+"))
    if not old:
        return f"{new}.{fqn}" if fqn else new
    segments, wanted = fqn.split("."), old.split(".")
    numbers = []
    if len(segments) < len(wanted):
        return fqn
    for segment, want in zip(segments, wanted, strict=False):
        if want == "*" and segment.isdecimal():
            numbers.append(segment)
        elif segment != want:
            return fqn
    given = iter(numbers)
    written = [next(given) if part == "*" else part for part in new.split(".") if part]
    return ".".join((*written, *segments[len(wanted) :]))
