"""Says of a test that takes long where its ranks are."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pytest_fsdp_comm.options import OPTIONS, SETTINGS
from pytest_fsdp_comm.text.rank_lists import fold_equal, name_ranks

if TYPE_CHECKING:
    import pytest

    from pytest_fsdp_comm.ranks.session.supervision import Supervision


def tell_progress(item: pytest.Item, supervision: Supervision, seconds: float) -> float:
    """Writes a line to the terminal, if there is one: an xdist worker has none.

    Args:
        item: The test.
        supervision: Its ranks.
        seconds: How long it has run; 0 only asks when to tell.

    Returns:
        After how many seconds to tell again.
    """
    reporter = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(item.config, "workerinput"):
        return math.inf
    if seconds == 0.0:
        return item.config.stash[OPTIONS].progress_s
    sites = {
        rank: "done" if position["is_over"] else f"at {position['site'] or 'unknown'}"
        for rank, position in supervision.positions().items()
    }
    told = "; ".join(f"{name_ranks(ranks)} {site}" for ranks, site in fold_equal(sites))
    deadline = item.stash[SETTINGS].timeout_s
    reporter.ensure_newline()
    reporter.write_line(
        f"fsdp-comm: {item.nodeid} still runs after {seconds:.0f} s (deadline {deadline:g} s): "
        f"{told or 'no rank answers'}"
    )
    return 2 * seconds
