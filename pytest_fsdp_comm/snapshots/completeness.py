"""Refuses to compare or write recordings that are known not to be the whole truth."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.errors import IncompleteRecordingError, UnseenCollectivesWarning
from pytest_fsdp_comm.text.rank_lists import name_ranks

if TYPE_CHECKING:
    from collections.abc import Sequence
    from collections.abc import Set as AbstractSet

    from pytest_fsdp_comm.comm.events import Gap
    from pytest_fsdp_comm.comm.profile import CommProfile
    from pytest_fsdp_comm.options import UnseenLevel

# By kind of gap, the lines above and below those of a recording.
_REFUSED: Final = {
    "unseen": (
        "comm_mode lacks something that was sent, so nothing was compared or written:\n"
        "send it by torch.distributed, on a thread that no earlier block has started; or, to "
        "compare the rest with a warning, set ini fsdp_comm_unseen = warn"
    ),
    "idle_model": (
        "comm_mode was given a model that did not run, so nothing was compared or written:\n"
        "give it the model that runs, as it is once wrapped; if this one rightly does not run, use "
        "comm_snapshot(allow_idle_model=True)"
    ),
    "value_dependent": (
        "the fake group exchanges no values, so what depends on them may be recorded wrongly, and "
        "nothing was compared or written:\n"
        'run the test with backend="gloo", or let fixed numbers decide; if these values decide '
        "nothing that is sent, use comm_snapshot(allow_value_dependent=True)"
    ),
}
# With the lines above and below, 8 at most, after which pytest cuts.
_SHOWN: Final = 4


def check_completeness(
    profile: CommProfile, *, unseen: UnseenLevel, allowed: AbstractSet[str] = frozenset()
) -> None:
    """Refuse a profile with gaps of kinds that are not allowed; `unseen` "warn" only warns."""
    for kind, text in _REFUSED.items():
        gaps = [gap for gap in profile.gaps if gap.kind == kind]
        if not gaps or kind in allowed:
            continue
        if kind != "unseen" or unseen == "error":
            raise IncompleteRecordingError(_around(gaps, *text.split("\n")))
        told = _around(gaps, "comm_mode is compared without what it lacks:")
        warnings.warn(told, UnseenCollectivesWarning, stacklevel=2)


def _around(gaps: Sequence[Gap], before: str, *after: str) -> str:
    lines = [
        f"  {gap.text} (on {name_ranks(gap.ranks)})" if gap.ranks else f"  {gap.text}"
        for gap in gaps
    ]
    more = [f"  and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "\n".join((before, *lines[:_SHOWN], *more, *after))
