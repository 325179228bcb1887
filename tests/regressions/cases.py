"""All cases: importing a family's file adds its own."""

from regressions import combined, frameworks, fsdp, lost, moe, pipelines, replicas, tensor_parallel
from regressions.table import TABLE

__all__ = [
    "TABLE",
    "combined",
    "frameworks",
    "fsdp",
    "lost",
    "moe",
    "pipelines",
    "replicas",
    "tensor_parallel",
]
