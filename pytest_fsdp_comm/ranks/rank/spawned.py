"""A spawned rank's own half: a fresh pytest process that collects one test and is a rank of it."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pytest_fsdp_comm.launch_environment import INSIDE_VARIABLE, RANK_VARIABLE, SPEC_VARIABLE
from pytest_fsdp_comm.ranks.rank.main import RankTemplate
from pytest_fsdp_comm.ranks.wire.extension import RankExtension
from pytest_fsdp_comm.ranks.wire.rank_set import RankSetSpec
from pytest_fsdp_comm.text.codec import load_tagged


def select_own_test(config: pytest.Config) -> None:
    """Make a spawned rank collect its own test only."""
    config.args[:] = [str(config.rootpath / _read_spec().nodeid)]


def run_spawned_rank(session: pytest.Session, extensions: Sequence[RankExtension[Any]]) -> NoReturn:
    """Run the rank that this process was started as, after collection."""
    spec = _read_spec()
    indices = [index for index, item in enumerate(session.items) if item.nodeid == spec.nodeid]
    if not indices:
        raise pytest.UsageError(
            f"{spec.nodeid} was not found when a spawned rank collected the tests again; tests "
            "whose names depend on chance, time or the process cannot run on spawned ranks"
        )
    rank, *descriptors = map(int, os.environ.pop(RANK_VARIABLE).split())
    # Tests that run pytest themselves must not take their pytest for a rank.
    del os.environ[SPEC_VARIABLE]
    os.environ[INSIDE_VARIABLE] = "1"
    template = RankTemplate(session, extensions)
    # As the fork server does: what is here now lives as long as the rank.
    gc.freeze()
    spec = dataclasses.replace(spec, item_index=indices[0])
    template.run_rank(spec, rank, (descriptors[0], descriptors[1]))


def _read_spec() -> RankSetSpec:
    text = Path(os.environ[SPEC_VARIABLE]).read_text(encoding="utf-8")
    return load_tagged({"RankSetSpec": RankSetSpec}, text)
