"""Where a rank is: one value, from the rank that reads it to the hang report that words it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

ROOT_ROLES: Final = {"broadcast": "src", "gather": "dst", "reduce": "dst", "scatter": "src"}
"""How torch calls the one rank that a collective gives to, or takes from."""
PEER_ROLES: Final = {"recv": "src", "send": "dst"}
"""Likewise of calls between two ranks."""


class Activity(StrEnum):
    """What a rank does where it is."""

    RUNS = "runs"
    REPORTS = "reports"
    """The test raised, at `Position.site`, and pytest makes the report."""
    HAS_ENDED = "has ended"
    HOLDS_GIL = "holds the GIL"
    """None of its threads can run Python code; only its site is known, from its stack."""
    STOPPED = "stopped"
    """A signal or a debugger has stopped the process."""
    IN_KERNEL = "in the kernel"
    """The kernel does not release it: a disk, a file server or a driver does not respond."""
    SILENT = "silent"
    """It lives, and did not answer in time."""

    @property
    def is_known(self) -> bool:
        """Whether the rank has answered, so that its groups are known."""
        return self in (Activity.RUNS, Activity.REPORTS, Activity.HAS_ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCollective:
    """One collective that a rank issued on a process group."""

    seq: int
    """Its number in the group's order, from 1; equal on all ranks of the group."""
    kind: str
    """Such as ``all_gather``."""
    nbytes: int
    """Bytes of the rank's input."""
    is_done: bool
    """Whether the rank has finished it, or gloo has failed in it."""
    sent: str = ""
    """The rank's input in words, such as ``4 float32``."""
    is_last: bool = False
    """Whether the rank has issued none after it, on any group."""
    root: int | None = None
    """The rank that it gives to or takes from; None if there is none, or the call is over."""
    is_waited_in: bool = False
    """Whether the main thread waits for it, itself or by a join; False if done or in background."""
    thread: str = ""
    """The name of the Python thread that waits in it; empty for the main thread."""
    site: str = ""
    """The innermost user code of the thread that waits in it; empty if none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """How far a rank has come on one process group."""

    name: str
    """Equal on all of its ranks."""
    axis: str
    """What recordings and trees call it; empty if unknown."""
    is_shape: bool
    """Whether `axis` only tells its shape, such as ``size2.stride4``."""
    ranks: tuple[int, ...]
    """The group's global ranks; empty where torch does not list them."""
    collectives: tuple[IssuedCollective, ...]
    """The last ones in order; empty if the rank has issued none."""
    ordinal: int = 1
    """Which of the rank's groups with these ranks it is, in order of creation, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnrecordedCall:
    """A call that waits for other ranks, and is no collective that the flight recorder knows."""

    name: str
    """What the rank waits in, such as ``new_group`` or ``recv``."""
    ranks: tuple[int, ...]
    """The ranks that it may wait for, itself not left out; empty if any."""
    is_mutual: bool
    """Whether these ranks have to make the same call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one rank is."""

    site: str
    """``path:line in function`` of the innermost user code; empty if unknown, or if none runs."""
    code: str = ""
    """The line of source there, such as ``lock.acquire()``; empty if unknown."""
    stack: tuple[str, ...] = ()
    """Lines that say more of the stack than `site`, innermost frame first; empty if unknown."""
    module: str = ""
    """FQN of the module or FSDP unit that runs; empty for the root or none."""
    groups: tuple[GroupPosition, ...] = ()
    """Each process group of the rank; empty if only the place was read."""
    call: UnrecordedCall | None = None
    """What the main thread waits in, if not in a collective."""
    activity: Activity = Activity.RUNS
    is_reporting: bool = False
    """Whether it compares with a snapshot or formats a failure, and so waits for no other rank."""
