"""A tree snapshot and recordings for tests of the command line."""

from dataclasses import replace

from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Source
from pytest_fsdp_comm.comm.mesh import MeshAxis

TREE = """\
# pytest-fsdp-comm 2 tree | torch 2.13.0, gloo (not compared)
world_size 4
mesh dp=4 stride 1
unit (root) fsdp2 root shard=dp reshard_after_forward=false
parameter a.weight bfloat16[8,4] dp=Shard(0)
parameter b.weight float32[8] dp=Shard(0)
total 1 units, 2 parameters
end
"""


def recording(rank=0, calls=1, world_size=2):
    collective = Collective(
        index=0, kind="all_gather", op="", owner="a", issued_in="a", phase=Phase.FORWARD,
        axis="dp", group_size=2, dtype="float32", nbytes_sent=4, nbytes_received=8,
        source=Source.FSDP, call_site="train.py:3",
    )  # fmt: skip
    return Recording(
        rank=rank,
        world_size=world_size,
        backend="gloo",
        torch_version="2.13.0",
        mesh_axes=(MeshAxis(name="dp", size=2, dims=((2, 1),)),),
        collectives=tuple(replace(collective, index=index) for index in range(calls)),
    )
