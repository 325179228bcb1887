"""Adds what to do to torch's errors about its default process group."""

from __future__ import annotations

import os
import re

import pytest

from pytest_fsdp_comm.options import SETTINGS
from pytest_fsdp_comm.ranks.rank.context import RANK_CONTEXT

# Parts of torch's texts (read in 2.6, 2.13 and 2.15).
_TWICE = "initialize the default process group twice"
_NONE = "Default process group has not been initialized"
_NO_VARIABLE = re.compile(
    "environment variable (RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set"
)

_UNMARKED = """\
fsdp-comm: this test is not marked as distributed, so it ran in pytest's own process, without ranks
and without a process group. Mark it, its class or its module:
    @pytest.mark.distributed(world_size=2)"""
_OWN_GROUP = """\
A test that needs a group of its own destroys this one first, and names a file for the ranks to
meet in (with the fixtures dist_info and tmp_path_factory):
    dist.destroy_process_group()
    path = tmp_path_factory.getbasetemp().parent / "name of this test alone"
    store = dist.FileStore(str(path), dist_info.world_size)
    dist.init_process_group(
        "gloo", store=store, rank=dist_info.rank, world_size=dist_info.world_size
    )"""
_SECOND_GROUP = f"""\
fsdp-comm: each rank of a distributed test has a process group before its first fixture runs, so
this one would be the second. Remove the call, and the destroy_process_group() that goes with it.
{_OWN_GROUP}"""
_DESTROYED = f"""\
fsdp-comm: each rank of a distributed test has a process group before its first fixture runs, but
here it has been destroyed. Remove the call of destroy_process_group(): the group ends with the
test.
{_OWN_GROUP}"""


def add_remedy(error: BaseException, item: pytest.Item) -> None:
    """Add a note to an error of torch about the default process group."""
    if not isinstance(error, ValueError):
        return
    text = str(error)
    lacks_group = _NONE in text or _NO_VARIABLE.search(text) is not None
    remedy = None
    if RANK_CONTEXT in item.config.stash:
        remedy = _SECOND_GROUP if _TWICE in text else _DESTROYED if lacks_group else None
    elif lacks_group and SETTINGS not in item.stash and "RANK" not in os.environ:
        # Without a launcher, under which tests without this plugin make their own groups.
        remedy = _UNMARKED
    if remedy and remedy not in getattr(error, "__notes__", ()):
        error.add_note(remedy)
