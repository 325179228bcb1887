"""What some versions of torch lack or do otherwise: conditions of tests, each with the fact."""

import re

import pytest
import torch
from torch.distributed.fsdp import fully_shard

VERSION = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))

HAS_FLIGHT_RECORDER = hasattr(torch._C._distributed_c10d, "_dump_fr_trace_json")
"""Whether torch has one that knows of gloo."""
needs_flight_recorder = pytest.mark.skipif(
    not HAS_FLIGHT_RECORDER, reason="this torch has no flight recorder that knows of gloo"
)

needs_replicas_of_fsdp2 = pytest.mark.skipif(
    VERSION < (2, 8),
    reason="FSDP2 of this torch cannot replicate on the CPU: it reduces by AVG, which gloo lacks, "
    "and needs an event that only a GPU gives",
)

needs_pipelines_on_gloo = pytest.mark.skipif(
    VERSION < (2, 8),
    reason="1F1B of this torch hangs on gloo: it waits for the last of several transfers alone",
)

needs_default_reshard = pytest.mark.skipif(
    "None" not in str(fully_shard.__annotations__.get("reshard_after_forward")),
    reason="reshard_after_forward of this torch cannot be None",
)

GATHERS_ON_ONE_RANK = VERSION < (2, 8)
"""Whether FSDP2 sends over an axis of one rank too."""

SHOWS_REDUCE_OP = VERSION >= (2, 8)
"""Whether the object that c10d's operations are given as the reduction has a method."""

SHOWS_ASYNC = "async" in str(torch.ops.c10d.allreduce_.default._schema)
"""Whether each of c10d's operations is told if its caller has to wait."""

SUMS_NORMS_AT_EACH_USE = VERSION < (2, 8)
"""Whether a norm of DTensors stays partial, and is reduced wherever it is read."""
