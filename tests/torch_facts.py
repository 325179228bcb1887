"""Differences between versions of torch, as conditions and skip marks for tests."""

import inspect
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

VERSION = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
# Checked in 2.7.1 and 2.9.1, and in 2.11.0, which differs; not checked in 2.8 and 2.10.
BEFORE_2_11 = VERSION < (2, 11)

HAS_FLIGHT_RECORDER = not BEFORE_2_11
"""Whether torch's flight recorder records gloo; that of 2.9 only records NCCL."""
needs_flight_recorder = pytest.mark.skipif(
    not HAS_FLIGHT_RECORDER, reason="the flight recorder of this torch does not record gloo"
)

needs_replicas_of_fsdp2 = pytest.mark.skipif(
    VERSION < (2, 8),
    reason="FSDP2 of this torch cannot replicate on the CPU: it reduces with AVG, which gloo "
    "lacks, and needs a GPU event",
)

needs_pipelines_on_gloo = pytest.mark.skipif(
    BEFORE_2_11,
    reason="1F1B of this torch fails on gloo, with or without the plugin: 2.7 hangs, because it "
    "waits only for the last of several transfers; 2.9 fails in the first transfer, because the "
    "sizes differ",
)

needs_default_reshard = pytest.mark.skipif(
    not re.search("Optional|None", str(fully_shard.__annotations__["reshard_after_forward"])),
    reason="this torch does not accept reshard_after_forward=None",
)

SENT_ON_ONE_RANK = {"all_gather": VERSION < (2, 8), "reduce_scatter": BEFORE_2_11}
"""Whether FSDP2 sends this kind over an axis of one rank, too."""

SHOWS_REDUCE_OP = not BEFORE_2_11
"""Whether the reduction that c10d's operations receive has a method that names it."""

HAS_DIVIDE_FACTOR = VERSION >= (2, 8)
"""Whether FSDP2 has `set_gradient_divide_factor` and `set_force_sum_reduction_for_comms`."""

SHOWS_ASYNC = "async" in str(torch.ops.c10d.allreduce_.default._schema)
"""Whether all of c10d's operations have an argument that says if they are asynchronous."""

SUMS_NORMS_AT_EACH_USE = BEFORE_2_11
"""Whether a norm of DTensors stays partial, and is reduced at each use."""

DDP_SKIPS_UNUSED = (
    "skip_all_reduce_unused_params" in inspect.signature(DistributedDataParallel).parameters
)
"""Whether DDP can leave out buckets whose parameters are all unused; 2.7 cannot."""

DDP_FINALIZES_MANUALLY = hasattr(DistributedDataParallel, "finalize_backward")
"""Whether DDP can wait for its all-reduces later than at the end of backward, as since 2.15."""

MESH_TAKES_BACKENDS = "backend_override" in inspect.signature(init_device_mesh).parameters
"""Whether a mesh may choose the backend of each axis; 2.7 cannot."""

HAS_DEVICE_INDEX = hasattr(torch.accelerator, "device_index")
"""Whether `torch.accelerator` has a context manager that selects a GPU; 2.7 does not."""
