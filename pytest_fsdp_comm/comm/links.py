"""How fast the ranks of each mesh axis exchange data, as the user states it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

OTHER_AXES: Final = "*"
"""In place of an axis: all axes that have no line of their own."""

_BANDWIDTHS: Final = {
    "GB/s": 1e9,
    "GiB/s": 2.0**30,
    "MB/s": 1e6,
    "MiB/s": 2.0**20,
    "Gbit/s": 1e9 / 8,
}
_LATENCIES: Final = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
_FORM: Final = "'<axis>: <bandwidth> <latency>', such as 'dp: 50 GB/s 10 us'"
_NUMBER: Final = r"([0-9]{1,9}(?:\.[0-9]{1,9})?)"
_SPEED: Final = re.compile(rf"{_NUMBER} ?([A-Za-z]+/s) +{_NUMBER} ?([A-Za-z]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How fast one rank exchanges data with its neighbours along one axis."""

    bandwidth: float
    """Bytes per second in each direction; greater than 0."""
    latency_s: float
    """Seconds for each hop of a message, however small; 0 or greater."""
    text: str
    """Both as the user wrote them: ``50 GB/s, 10 us``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The links of all axes."""

    by_axis: Mapping[str, Link] = field(default_factory=dict)
    """By the name of the mesh axis, or `OTHER_AXES`."""

    def __bool__(self) -> bool:
        """Whether any link is known."""
        return bool(self.by_axis)

    def of(self, axis: str) -> Link | None:
        """Find the link of one axis; None if it is unknown."""
        return self.by_axis.get(axis) or self.by_axis.get(OTHER_AXES)


def parse_links(lines: Iterable[str]) -> Links:
    """Read lines of ``fsdp_comm_links`` (``dp: 50 GB/s 10 us``); a ValueError names a bad one."""
    found: dict[str, tuple[int, Link]] = {}
    for place, line in enumerate(filter(None, map(str.strip, lines)), start=1):
        try:
            axis, link = _parse_line(line)
        except ValueError as problem:
            raise ValueError(f"fsdp_comm_links, line {place}: {problem}") from None
        if axis in found:
            raise ValueError(
                f"fsdp_comm_links, line {place}: {axis!r} is also in line {found[axis][0]}; keep "
                "one of the two"
            )
        found[axis] = (place, link)
    return Links(by_axis={axis: link for axis, (_, link) in found.items()})


def _parse_line(line: str) -> tuple[str, Link]:
    # An axis may have a colon in its name, a speed has none.
    axis, _, speed = (word.strip() for word in line.rpartition(":"))
    match = _SPEED.fullmatch(speed)
    if not axis or match is None:
        raise ValueError(f"cannot read {line!r}; expected {_FORM}")
    amount, unit, delay, delay_unit = match.groups()
    for written, known in ((unit, _BANDWIDTHS), (delay_unit, _LATENCIES)):
        if written not in known:
            raise ValueError(
                f"unknown unit {written!r} in {line!r}; expected one of {', '.join(known)}"
            )
    bandwidth = float(amount) * _BANDWIDTHS[unit]
    if not bandwidth:
        raise ValueError(f"expected a bandwidth above 0, got {line!r}")
    return axis, Link(
        bandwidth=bandwidth,
        latency_s=float(delay) * _LATENCIES[delay_unit],
        text=f"{amount} {unit}, {delay} {delay_unit}",
    )
