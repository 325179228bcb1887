"""List all kinds of steps; to add one, write a class and add it here."""

from __future__ import annotations

from typing import Final

from pytest_fsdp_comm.comm.explanation.amounts import Counts, Dtype, Sizes, Steps
from pytest_fsdp_comm.comm.explanation.gradients import (
    Buckets,
    Flattened,
    Reduced,
    ReducedPart,
    ReducedTimes,
)
from pytest_fsdp_comm.comm.explanation.names import AxisRenamed, Layers, Renamed
from pytest_fsdp_comm.comm.explanation.overlap import Waits
from pytest_fsdp_comm.comm.explanation.passes import (
    AxisUsed,
    Exchanged,
    GatheredInFull,
    OtherTensors,
    PhaseUsed,
    Recomputed,
    Redistributed,
    SequenceParallel,
)
from pytest_fsdp_comm.comm.explanation.resharding import (
    Freed,
    GatheredElsewhere,
    GatheredInBackward,
)
from pytest_fsdp_comm.comm.explanation.steps import Step
from pytest_fsdp_comm.comm.explanation.units import (
    Called,
    Gathered,
    MovedUnits,
    Regrouped,
    Sharded,
    ShardedElsewhere,
    SplitOff,
    UnitSizes,
)

KINDS: Final[tuple[type[Step], ...]] = (
    AxisRenamed,
    Renamed,
    Layers,
    Counts,
    Steps,
    Sizes,
    Dtype,
    AxisUsed,
    Recomputed,
    SequenceParallel,
    PhaseUsed,
    Redistributed,
    Exchanged,
    OtherTensors,
    GatheredInFull,
    UnitSizes,
    GatheredElsewhere,
    ReducedTimes,
    Reduced,
    ReducedPart,
    Regrouped,
    MovedUnits,
    Called,
    Buckets,
    Flattened,
    Freed,
    GatheredInBackward,
    Sharded,
    ShardedElsewhere,
    SplitOff,
    Gathered,
    Waits,
)
"""In the order of `Step.order`. Of two equally good steps, the search prefers the earlier kind."""
