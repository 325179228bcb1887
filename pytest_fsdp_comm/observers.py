"""How fixtures pass on what they make, where a report of the run is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from syrupy.assertion import SnapshotAssertion

    from pytest_fsdp_comm.tree.model import ShardTree


class Observer(Protocol):
    """Keeps what the running test makes."""

    def note_comparison(self, assertion: SnapshotAssertion, values: Mapping[str, object]) -> None:
        """Keep a comparison of a `CommSnapshot`; a value without a name has the name ``""``."""

    def note_tree(self, tree: ShardTree) -> None:
        """Keep a tree that ``fsdp_tree`` has just made."""


OBSERVER: Final = pytest.StashKey[Observer]()
"""On the config's stash: present exactly if a report is written."""
