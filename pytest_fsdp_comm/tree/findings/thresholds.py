"""From which size on something is a finding."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholds:
    """From which size on something is a finding."""

    small_nbytes: int = 1 << 20
    """What a collective costs, in bytes: its latency times the bandwidth of the link.

    A unit that gathers less, and less than a sixteenth of the largest unit, is too small; a change
    that adds collectives pays if it saves more bytes than this for each. 1 MiB by our choice, not
    by a measurement: 20 us at 50 GB/s. Measure with nccl-tests on your machines, and set it.
    """
    large_nbytes: int = 4 << 30
    """A unit that gathers more is too large: 4 GiB by our choice, since prefetching holds two
    units at once."""
    replicated_nbytes: int = 16 << 20
    """A parameter that every rank holds whole is large from here on."""
    padding_share: float = 0.1
    """Padding of more than this share of a unit's all-gather is a finding."""
    padding_nbytes: int = 64 << 10
    """Padding of fewer bytes is none, whatever its share: 64 KiB by our choice."""
