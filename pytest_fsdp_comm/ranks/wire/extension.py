"""What other rooms add to the way of a test through its ranks and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

Outcome = Literal["passed", "failed", "skipped"]


class RankExtension(Protocol):
    """Prepares each rank, carries something out of it, and receives it in the parent."""

    def enter_rank(self, config: pytest.Config) -> None:
        """Runs in the process that ranks are forked from, or in a spawned rank, once."""

    def rank_payload(self, item: pytest.Item) -> Any:
        """Runs in the rank, after the test's protocol.

        Returns:
            Something that JSON can carry.
        """

    def merge(self, item: pytest.Item, payloads: Mapping[int, Any], outcome: Outcome) -> list[str]:
        """Runs in the parent, once a test.

        Args:
            item: The test.
            payloads: What each rank returned; a rank that died is missing.
            outcome: The merged verdict.

        Returns:
            Problems; any of them turns the test into a failure with these texts.
        """
