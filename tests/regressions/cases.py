"""All cases: importing a family's file adds its own."""

from regressions import fsdp, moe, pipelines, replicas, tensor_parallel
from regressions.table import TABLE

__all__ = ["TABLE", "fsdp", "moe", "pipelines", "replicas", "tensor_parallel"]
