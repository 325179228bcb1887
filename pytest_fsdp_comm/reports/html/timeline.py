"""What one rank did in order, small enough to be sent and drawn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.comm.events import Collective

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_fsdp_comm.comm.events import Recording, Reshard

MAX_ENTRIES: Final = 8_000
"""Entries that are kept of one rank: 126 layers in two steps have about 6,000. A page of so many is
about 600 kB."""

UNSHARD: Final = "unshard"
RESHARD: Final = "reshard"
NOTHING: Final = -1
"""In columns of names: no module, no axis, no call site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The collectives, unshards and reshards of one rank, an entry of each column for each of them.

    Columns of names hold indices into `names`.
    """

    names: tuple[str, ...]
    whats: tuple[int, ...]
    """Kinds of collectives, ``unshard`` and ``reshard``."""
    modules: tuple[int, ...]
    """Owners, and the modules of units; `NOTHING` for no module."""
    phases: tuple[int, ...]
    axes: tuple[int, ...]
    """`NOTHING` for unshards and reshards."""
    sites: tuple[int, ...]
    """Call sites; `NOTHING` where unknown."""
    nbytes: tuple[int, ...]
    """Message sizes, and bytes of the parameters of units."""
    peak: int
    """As `events.Recording.peak_gathered_nbytes`, of the whole recording."""
    left_out: int = 0
    """Later entries that are not kept."""

    def __len__(self) -> int:
        """How many entries are kept."""
        return len(self.whats)

    def what(self, at: int) -> str:
        """The kind of an entry, or ``unshard`` or ``reshard``."""
        return self.names[self.whats[at]]

    def module(self, at: int) -> str | None:
        """The module of an entry; None if it has none."""
        return self._name(self.modules[at])

    def phase(self, at: int) -> str:
        """The phase of an entry."""
        return self.names[self.phases[at]]

    def axis(self, at: int) -> str:
        """The axis of an entry; empty for unshards and reshards."""
        return self._name(self.axes[at]) or ""

    def site(self, at: int) -> str:
        """The call site of an entry; empty where unknown."""
        return self._name(self.sites[at]) or ""

    def _name(self, index: int) -> str | None:
        return None if index == NOTHING else self.names[index]

    def first(self, count: int) -> Timeline:
        """The same without the entries from a place on."""
        if count >= len(self):
            return self
        return Timeline(
            names=self.names,
            whats=self.whats[:count],
            modules=self.modules[:count],
            phases=self.phases[:count],
            axes=self.axes[:count],
            sites=self.sites[:count],
            nbytes=self.nbytes[:count],
            peak=self.peak,
            left_out=self.left_out + len(self) - count,
        )


def timeline_of(recording: Recording) -> Timeline:
    """Puts a recording in order; the first `MAX_ENTRIES` are kept."""
    entries: list[Collective | Reshard] = [*recording.collectives, *recording.reshards]
    entries.sort(key=lambda entry: entry.index)
    kept = entries[:MAX_ENTRIES]
    names: dict[str, int] = {}

    def column(texts: Iterable[str | None]) -> tuple[int, ...]:
        return tuple(
            NOTHING if text is None else names.setdefault(text, len(names)) for text in texts
        )

    # `names` is complete only after the columns.
    columns = {
        "whats": column(e.kind if isinstance(e, Collective) else e.action for e in kept),
        "modules": column(e.owner if isinstance(e, Collective) else e.module for e in kept),
        "phases": column(entry.phase.value for entry in kept),
        "axes": column(e.axis if isinstance(e, Collective) else None for e in kept),
        "sites": column((e.call_site or None) if isinstance(e, Collective) else None for e in kept),
        "nbytes": tuple(entry.nbytes for entry in kept),
    }
    return Timeline(
        names=tuple(names),
        **columns,
        peak=recording.peak_gathered_nbytes,
        left_out=len(entries) - len(kept),
    )
