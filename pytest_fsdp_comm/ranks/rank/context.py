"""The context of a rank, and the interface of extensions that run in ranks."""

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
    """One rank during the current test: its number, settings, device and connections."""

    rank: int
    local_rank: int
    local_world_size: int
    settings: DistributedSettings
    device: str
    """The device for this rank's tensors: ``cpu`` or ``cuda:N``."""
    exchange: Exchange
    store: Any
    """The `torch.distributed.Store` through which ranks create their process group."""


RANK_CONTEXT: Final = pytest.StashKey[RankContext]()
"""Key in the config's stash; set only in ranks."""

_Payload = TypeVar("_Payload")


class RankExtension(Protocol[_Payload]):
    """A feature, such as the run report, that sends data from each rank to the pytest process."""

    @property
    def payload_type(self) -> type[_Payload]:
        """The type of the payload: a frozen dataclass that `text.codec` can parse."""

    def enter_rank(self, config: pytest.Config) -> None:
        """Prepare a process for running ranks; called once in the fork server or a spawned rank."""

    def rank_payload(self, item: pytest.Item) -> _Payload:
        """Return the rank's payload; called in the rank, after pytest's protocol for the test."""

    def merge(
        self,
        item: pytest.Item,
        payloads: Mapping[int, _Payload],
        *,
        has_failed: bool,
        has_passed: bool,
    ) -> list[str]:
        """Process all payloads in the pytest process; the test fails if this returns problems.

        `payloads` has no entry for ranks that died. A skipped test has neither failed nor passed.
        """


EXTENSIONS: Final = pytest.StashKey[list[RankExtension[Any]]]()
"""Key in the config's stash for the extensions of a session with ranks."""
