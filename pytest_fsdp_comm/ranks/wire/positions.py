"""Where a rank is, as values: a rank reads its own, and `hangs` explains those of a rank set."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Activity(StrEnum):
    """What a rank does where it is."""

    RUNS = "runs"
    """It runs the test."""
    HAS_ENDED = "has ended"
    """It has finished the test; the other ranks may not."""
    HOLDS_GIL = "holds the GIL"
    """It did not answer; only its site is known, from its stack."""


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
    """Whether the rank has finished it; otherwise it waits in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPosition:
    """How far a rank has come on one process group."""

    name: str
    """The group's name, equal on all of its ranks."""
    axis: str
    """What recordings and trees call it; empty if unknown."""
    is_shape: bool
    """Whether `axis` only tells its shape, such as ``size2.stride4``."""
    ranks: tuple[int, ...]
    """The group's global ranks; empty where torch does not list them."""
    collectives: tuple[IssuedCollective, ...]
    """The last ones in order; empty if the rank has issued none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where one rank is."""

    site: str
    """``path:line in function`` of the innermost user code; empty if unknown."""
    module: str = ""
    """FQN of the module or FSDP unit that runs; empty for the root or none."""
    groups: tuple[GroupPosition, ...] = ()
    """Each process group of the rank."""
    activity: Activity = Activity.RUNS
    """What the rank does there."""
