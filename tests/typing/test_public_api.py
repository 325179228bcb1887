"""The public API as a user's type checker sees it: mypy checks this file, pytest runs it."""

from __future__ import annotations

import pydoc
import re
import subprocess
import sys
from typing import assert_type

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import pytest_fsdp_comm
from pytest_fsdp_comm import (
    Collective,
    CommMode,
    CommProfile,
    CommSnapshot,
    DistInfo,
    MakeDeviceMesh,
    Phase,
    Recording,
    ShardTree,
    TreeFactory,
)


@pytest.mark.distributed(world_size=2, backend="fake")
def test_fixtures_have_their_documented_types(
    comm_mode: CommMode,
    fsdp_tree: TreeFactory,
    comm_snapshot: CommSnapshot,
    device_mesh: MakeDeviceMesh,
    dist_info: DistInfo,
) -> None:
    mesh = device_mesh(dp=-1)
    assert_type(mesh, DeviceMesh)
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    with comm_mode(model) as mode:
        assert_type(mode, CommMode)
        model(torch.ones(1, 4)).sum().backward()
    assert_type(comm_mode.events, tuple[Collective, ...])
    assert_type(comm_mode.events[0].ahead, int | None)
    assert_type(comm_mode.reshards[0].ahead, int | None)
    assert_type(comm_mode.peak_gathered_nbytes, int)
    assert_type(comm_mode.recording, Recording)
    assert_type(comm_mode.profile, CommProfile)
    assert_type(comm_mode.counts("all_gather", phase=Phase.FORWARD, owner=""), int)
    assert_type(fsdp_tree(model), ShardTree)
    assert_type(dist_info.rank, int)
    assert_type(comm_snapshot(name="tree", allow_empty=True), CommSnapshot)
    assert_type(comm_snapshot(allow_value_dependent=True), CommSnapshot)
    assert_type(comm_snapshot(allow_unused=True), CommSnapshot)
    assert comm_mode.counts("all_gather", phase="forward", owner="") == 1
    assert comm_mode.nbytes("all_gather") == (4 * 4 + 4) * 4
    assert dist_info.world_size == 2


def test_every_public_name_is_there() -> None:
    for name in pytest_fsdp_comm.__all__:
        assert getattr(pytest_fsdp_comm, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'Nonsense'"):
        _ = pytest_fsdp_comm.Nonsense


def test_dir_and_help_list_public_names() -> None:
    assert set(pytest_fsdp_comm.__all__) <= set(dir(pytest_fsdp_comm))
    help_text = re.sub(".\b", "", pydoc.render_doc(pytest_fsdp_comm))  # less the bold print
    for name in pytest_fsdp_comm.__all__:
        kind = "class " if name[0].isupper() else ""
        assert f"{kind}{name}(" in help_text or f"{kind}{name}\n" in help_text, name
    first_screen = "\n".join(help_text.splitlines()[:40])
    for fixture in ("comm_mode", "fsdp_tree", "comm_snapshot", "device_mesh", "dist_info"):
        assert f"    {fixture} " in first_screen


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, pytest_fsdp_comm; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
