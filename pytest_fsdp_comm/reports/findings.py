"""The findings that a failed assertion is about, as part of its text."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.tree.finding import Findings

if TYPE_CHECKING:
    from collections.abc import Iterator

# How pytest says where a value in an assertion comes from (8.4 to 9.2); more spaces are nested.
_ORIGIN: Final = re.compile(r" \+( +)(?:where|and  ) (.*)")


def explain_findings(error: AssertionError) -> None:
    """Write the findings that an assertion was about into its message, if that shows any."""
    # pytest asks no hook about ``assert not tree.findings``, and shortens each value to one line of
    # 240 characters. What it wrote of where the findings come from is left out: the tree, the
    # model.
    if len(error.args) != 1 or not isinstance(error.args[0], str):
        return
    message: str = error.args[0]
    for shown, text in dict.fromkeys((repr(found), str(found)) for found in _findings(error)):
        explained = "\n".join(f"  {line}" for line in text.splitlines())
        if shown in message and explained not in message:
            message = "\n".join([*_without_origin(message, shown), explained])
    error.args = (message,)


def _findings(error: AssertionError) -> Iterator[Findings]:
    """What the failing frame holds, the values of parts of an assertion included."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    held = traceback.tb_frame.f_locals if traceback is not None else {}
    for value in held.values():
        # Never isinstance(), which runs the code of proxies.
        if issubclass(type(value), Findings) and value:
            yield value


def _without_origin(message: str, shown: str) -> Iterator[str]:
    """The lines of a message without those that say where a value comes from."""
    above = 0
    for line in message.split("\n"):
        origin = _ORIGIN.fullmatch(line)
        depth = len(origin[1]) if origin else 0
        if above and depth > above:
            continue
        above = depth if origin and origin[2].startswith(f"{shown} = ") else 0
        if not above:
            yield line
