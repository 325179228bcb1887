"""Run small steps in forks of this process, each without one private name of torch.

The process imports torch and builds the models, but imports the package only in the forks, so names
that the package reads when it is imported count too. It reads lines ``<step> <name>`` (the name may
be missing) and prints, for each, a JSON string that `outcome` returned.
"""

import contextlib
import hashlib
import json
import operator
import os
import pkgutil
import sys
import traceback
import warnings
from dataclasses import replace
from pathlib import Path

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from models import WIDTH, Block, Model, shard
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

warnings.simplefilter("ignore")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
TORCH = str(Path(torch.__file__).parent)
MESH = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
FSDP2 = shard(Model(1), MESH)
FSDP1 = FullyShardedDataParallel(Block(), device_id=torch.device("cpu"))
STATE = FSDP2._get_fsdp_state()
(UNIT,) = getattr(STATE, "_fsdp_param_groups", None) or [STATE._fsdp_param_group]
HANDLE = FSDP1._handle
OBJECTS = {
    "state": STATE,
    "unit": UNIT,
    "param": UNIT.fsdp_params[0],
    "wrapper": FSDP1,
    "handle": HANDLE,
    "flat_param": HANDLE.flat_param,
    "gather": torch.ops.c10d._allgather_base_.default,
    "add": torch.ops.aten.add.Tensor,
}


def train(*models):
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def record():
    from pytest_fsdp_comm import CommMode

    mode = CommMode(trace_operations=False)
    for model in (FSDP2, FSDP1):
        with mode(model):
            train(model)
            DTensor.from_local(torch.ones(2), MESH, [Shard(0)]).redistribute(MESH, [Replicate()])
            funcol.wait_tensor(funcol.all_reduce(torch.ones(2), "sum", MESH))
        yield replace(mode.recording, timings=(), notes=(), reshards=())
        yield [(event.action, event.module, event.nbytes) for event in mode.reshards]


def simulate():
    from pytest_fsdp_comm import CommMode
    from pytest_fsdp_comm.simulation.world import simulate_rank

    with simulate_rank(assumes=True):
        model, mode = (
            shard(Model(1), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))),
            CommMode(),
        )
        on_gpu = Block().to("cuda")
        with mode(model):
            train(model)
        yield [(event.owner, event.kind, event.nbytes) for event in mode.events]
        yield str(on_gpu(torch.ones(2, WIDTH, device="cuda")).device), torch.ones(2).sum().item()


def capture():
    from pytest_fsdp_comm.sharding.capture import capture_tree

    for model in (FSDP2, FSDP1, replicate(Block())):
        tree = capture_tree(model)
        yield tree.units, tree.parameters, tree.modules


def remove(name):
    """Remove an attribute, and return whether it was there."""
    place, _, attribute = name.rpartition(".")
    try:
        owner = OBJECTS[place] if place in OBJECTS else pkgutil.resolve_name(place)
    except (ImportError, AttributeError):
        return False
    if not hasattr(owner, attribute):
        return False
    if attribute in vars(owner):
        delattr(owner, attribute)
    else:  # of a base class written in C++
        setattr(owner, attribute, property(operator.attrgetter(f"no {attribute}")))
    return True


def outcome(step, name):
    """Return the step's results, or its error, without a name of torch."""
    try:
        if name and not remove(name):
            return "absent"
        return hashlib.sha256(repr([*globals()[step]()]).encode()).hexdigest()
    except Exception as error:  # noqa: BLE001  # any error is an outcome
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
        place = "torch" if files[-1].startswith(TORCH) else "package"
        return f"{place}: {type(error).__name__}: {error}"


for line in sys.stdin:
    step, _, name = line.strip().partition(" ")
    read, write = os.pipe()
    if not os.fork():
        with contextlib.suppress(BaseException):
            os.write(write, json.dumps(outcome(step, name)[: 1 << 12]).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as stream:
        text = stream.read().decode()
    os.wait()
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
