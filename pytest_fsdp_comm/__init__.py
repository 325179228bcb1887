"""Communication regression tests for PyTorch FSDP.

A test sets its number of ranks, records a block of code, and compares the recording with reviewed
snapshot files::

    @pytest.mark.distributed(world_size=4)
    def test_train_step(device_mesh, comm_mode, fsdp_tree, comm_snapshot):
        model = shard(build_model(), device_mesh())
        with comm_mode(model):
            loss(model(batch())).backward()
        assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot

The fixtures, and their types for annotations:

    comm_mode      CommMode        records the collectives of a block
    fsdp_tree      TreeFactory     shows how a model is sharded
    comm_snapshot  CommSnapshot    compares with the reviewed files of the test
    device_mesh    MakeDeviceMesh  makes a mesh of all ranks
    dist_info      DistInfo        this rank, the world size, the backend and the device

``pytest --markers`` explains the marker's arguments, ``pytest --help`` the options, and
``pytest --fixtures -v`` the fixtures.

The other names are for code that reads recordings or catches errors. Importing this package does
not import torch: names that need it are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.errors import (
    EmptyRecordingError,
    FsdpCommError,
    IncompleteRecordingError,
    RanksDivergedError,
    RecordingError,
    SnapshotFormatError,
    UnseenCollectivesWarning,
    UpstreamChangedError,
)

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.events import (
        Answer,
        Beside,
        Collective,
        Gap,
        HostWait,
        Phase,
        Recording,
        Redistribution,
        Reshard,
        Source,
    )
    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.comm.profile import CommProfile
    from pytest_fsdp_comm.fixtures import DistInfo, MakeDeviceMesh
    from pytest_fsdp_comm.fsdp_tree import TreeFactory
    from pytest_fsdp_comm.recording.comm_mode import CommMode
    from pytest_fsdp_comm.recording.steps import record_script
    from pytest_fsdp_comm.snapshots.extension import CommSnapshot
    from pytest_fsdp_comm.tree.model import ShardTree

__all__ = [
    "Answer",
    "Beside",
    "Collective",
    "CommMode",
    "CommProfile",
    "CommSnapshot",
    "DistInfo",
    "EmptyRecordingError",
    "FsdpCommError",
    "Gap",
    "HostWait",
    "IncompleteRecordingError",
    "MakeDeviceMesh",
    "MeshAxis",
    "Phase",
    "RanksDivergedError",
    "Recording",
    "RecordingError",
    "Redistribution",
    "Reshard",
    "ShardTree",
    "SnapshotFormatError",
    "Source",
    "TreeFactory",
    "UnseenCollectivesWarning",
    "UpstreamChangedError",
    "record_script",
]

_LAZY = {
    name: module
    for module, names in {
        "comm.events": (
            "Answer Beside Collective Gap HostWait Phase Recording Redistribution Reshard Source"
        ),
        "comm.mesh": "MeshAxis",
        "comm.profile": "CommProfile",
        "fixtures": "DistInfo MakeDeviceMesh",
        "fsdp_tree": "TreeFactory",
        "recording.comm_mode": "CommMode",
        "recording.steps": "record_script",
        "snapshots.extension": "CommSnapshot",
        "tree.model": "ShardTree",
    }.items()
    for name in names.split()
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
