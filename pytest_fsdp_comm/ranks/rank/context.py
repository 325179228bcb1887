"""What a rank of one test knows about itself, and what other rooms add to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

import pytest

from pytest_fsdp_comm.options import DistributedSettings

if TYPE_CHECKING:
    from pytest_fsdp_comm.gathering import Exchange  # every session imports this module


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """One rank of one test."""

    rank: int
    local_rank: int
    """This rank on its machine, from 0."""
    local_world_size: int
    settings: DistributedSettings
    device: str
    """Where this rank's tensors belong: ``cpu`` or ``cuda:N``."""
    exchange: Exchange
    store: Any
    """The store of torch on which the ranks make their process group."""


RANK_CONTEXT: Final = pytest.StashKey[RankContext]()
"""On the config's stash: present exactly in a rank."""

_Payload = TypeVar("_Payload")


class RankExtension(Protocol[_Payload]):
    """Prepares each rank, carries a value out of it, and receives it in the pytest process."""

    @property
    def payload_type(self) -> type[_Payload]:
        """The frozen dataclass that `rank_payload` returns, as `text.codec` reads it."""

    def enter_rank(self, config: pytest.Config) -> None:
        """Run in the process that ranks are forked from, or in a spawned rank, once."""

    def rank_payload(self, item: pytest.Item) -> _Payload:
        """Run in the rank, after the test's protocol."""

    def merge(
        self,
        item: pytest.Item,
        payloads: Mapping[int, _Payload],
        *,
        has_failed: bool,
        has_passed: bool,
    ) -> list[str]:
        """Run in the pytest process, once per test; any problem that it returns fails the test.

        A rank that died is missing in `payloads`; `has_failed` is whether a rank failed the test,
        `has_passed` whether it passed on all: it may also be skipped.
        """
