"""Communication regression tests for PyTorch FSDP.

The names below are for annotations and for tests that build or read values themselves; tests get
them from fixtures. Importing this package imports no torch: names that need it load on first use.
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
        Collective,
        Gap,
        HostDeviceCopy,
        Phase,
        Recording,
        Redistribution,
        Reshard,
        Source,
        Timing,
    )
    from pytest_fsdp_comm.comm.mesh import MeshAxis
    from pytest_fsdp_comm.comm.profile import CommProfile
    from pytest_fsdp_comm.fixtures import DistInfo, MakeDeviceMesh
    from pytest_fsdp_comm.fsdp_tree import TreeFactory
    from pytest_fsdp_comm.recording.comm_mode import CommMode
    from pytest_fsdp_comm.snapshots.extension import CommSnapshot
    from pytest_fsdp_comm.tree.model import ShardTree

__all__ = [
    "Collective",
    "CommMode",
    "CommProfile",
    "CommSnapshot",
    "DistInfo",
    "EmptyRecordingError",
    "FsdpCommError",
    "Gap",
    "HostDeviceCopy",
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
    "Timing",
    "TreeFactory",
    "UnseenCollectivesWarning",
    "UpstreamChangedError",
]

_LAZY = {
    "Collective": "comm.events",
    "CommMode": "recording.comm_mode",
    "CommProfile": "comm.profile",
    "CommSnapshot": "snapshots.extension",
    "DistInfo": "fixtures",
    "Gap": "comm.events",
    "HostDeviceCopy": "comm.events",
    "MakeDeviceMesh": "fixtures",
    "MeshAxis": "comm.mesh",
    "Phase": "comm.events",
    "Recording": "comm.events",
    "Redistribution": "comm.events",
    "Reshard": "comm.events",
    "ShardTree": "tree.model",
    "Source": "comm.events",
    "Timing": "comm.events",
    "TreeFactory": "fsdp_tree",
}


def __getattr__(name: str) -> Any:
    """Loads a public name on first use."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
