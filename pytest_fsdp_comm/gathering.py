"""Collects the same thing from every rank, or says that the ranks are at different things."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pytest_fsdp_comm.errors import RanksDivergedError

if TYPE_CHECKING:
    from collections.abc import Callable


def gather_alike(gather: Callable[[str], list[str]], label: str, text: str) -> list[str]:
    """Exchanges a text with the other ranks.

    Args:
        gather: The exchange: takes this rank's text, gives those of all recorded ranks.
        label: What the text is, in one line, e.g. ``comm_mode``.
        text: This rank's text.

    Returns:
        The texts in rank order.

    Raises:
        RanksDivergedError: Another rank exchanged something else.
    """
    received = [sent.partition("\n") for sent in gather(f"{label}\n{text}")]
    others = sorted({found for found, _, _ in received if found != label})
    if others:
        raise RanksDivergedError(
            f"this rank compared {label} with a snapshot, another one {', '.join(others)}; every "
            "rank has to make the same comparisons in the same order (is one inside an "
            "`if rank == ...`?)"
        )
    return [content for _, _, content in received]
