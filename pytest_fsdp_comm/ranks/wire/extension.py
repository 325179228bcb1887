"""What other rooms add to a test's way through its ranks and back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

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
