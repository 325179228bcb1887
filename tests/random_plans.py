"""Random models with random parallel plans, for `tests/acceptance/test_random_plans.py`.

That test runs this file on gloo ranks, on the fake group and on simulated ranks, and compares the
recordings. pytest does not collect the file itself.
"""

import itertools
import json
import os
import pathlib

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from models import WIDTH, Block, Model, step
from oracle import gloo_and_fake, lines, witnessed
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.text.codec import to_json
from pytest_fsdp_comm.tree.profile import tree_facts

TIMES = int(os.environ.get("RANDOM_PLANS_TIMES", "1"))
EXAMPLES = {2: 15 * TIMES, 4: 8 * TIMES, 8: 4 * TIMES}
"""Number of plans by world size: eight gloo ranks are slow."""


class Checkpointed(Block):
    def forward(self, x):
        return checkpoint(super().forward, x, use_reentrant=False)


BLOCKS = st.fixed_dictionaries(
    {
        "unit": st.booleans(),
        "reshard_after_forward": st.sampled_from([True, False, None]),
        "tensor_parallel": st.booleans(),
        "frozen": st.booleans(),
        "checkpointed": st.booleans(),
        "bfloat16": st.booleans(),
    }
)
PLANS = st.fixed_dictionaries(
    {
        "blocks": st.lists(BLOCKS, min_size=1, max_size=4),
        "root": st.booleans(),
        "axes": st.sampled_from(["dp", "replicate,shard", "dp,tp"]),
        "prefetch": st.booleans(),
        "micro_batches": st.integers(1, 2),
        "accumulated": st.booleans(),
        "counted": st.booleans(),
        "clipped": st.booleans(),
    }
)


def build(plan, device_mesh, world_size):
    names = plan["axes"].split(",")
    sizes = {names[0]: world_size if len(names) == 1 else world_size // 2}
    sizes |= dict.fromkeys(names[1:], 2)
    mesh = device_mesh(**sizes)
    data = mesh["dp"] if "tp" in names else mesh
    model = Model(blocks=0)
    for wanted in plan["blocks"]:
        block = Checkpointed() if wanted["checkpointed"] else Block()
        if wanted["tensor_parallel"] and "tp" in names:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
        block.requires_grad_(not wanted["frozen"])
        model.layers.append(block)
    units = []
    for block, wanted in zip(model.layers, plan["blocks"], strict=True):
        if wanted["unit"]:
            dtype = torch.bfloat16 if wanted["bfloat16"] else None
            fully_shard(
                block,
                mesh=data,
                reshard_after_forward=wanted["reshard_after_forward"],
                mp_policy=MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32),
            )
            units.append(block)
    if plan["root"] or not units:
        fully_shard(model, mesh=data)
        if plan["prefetch"]:
            for unit, following in itertools.pairwise(units):
                unit.set_modules_to_forward_prefetch([following])
    return model


def clipped(model):
    """Return parameters of one mesh, as torch computes no norm over DTensors of several."""
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    kinds = [getattr(weight, "device_mesh", None) for weight in trained]
    return [weight for weight, kind in zip(trained, kinds, strict=True) if kind == kinds[0]]


def counted_step(model):
    """Run a step whose loss is divided by the number of labels on all ranks."""
    labels = torch.randint(0, 4, (2, WIDTH))
    count = (labels > 0).sum()
    dist.all_reduce(count)
    loss = model(torch.ones(2, WIDTH, requires_grad=True))[labels > 0].sum() / count
    if count.item() >= 0:
        loss.backward()


def run(*, plan, comm_mode, device_mesh, dist_info, results, is_simulated):
    # Skip plans that send nothing: an axis of one rank needs no collectives.
    has_tensor_parallelism = any(block["tensor_parallel"] for block in plan["blocks"])
    assume(dist_info.world_size > 2 or plan["axes"] != "dp,tp" or has_tensor_parallelism)
    model = build(plan, device_mesh, dist_info.world_size)

    def train():
        for num_left in reversed(range(plan["micro_batches"])):
            for unit in model.modules() if plan["accumulated"] else ():
                if isinstance(unit, FSDPModule):
                    unit.set_requires_gradient_sync(num_left == 0)
            if plan["counted"]:
                counted_step(model)
            else:
                step(model)
        if plan["clipped"]:
            norm = nn.utils.clip_grad_norm_(clipped(model), 1.0)
            if torch.isfinite(norm):
                dist.barrier()

    # From the second step on, each step starts in the same state: the first may unshard a root.
    if is_simulated:
        train()
        with comm_mode(model):
            train()
    else:
        witnessed(comm_mode, model, train, warm_up=1)
    tree = to_json(tree_facts(capture_tree([model])))
    results.append({"plan": plan, "events": lines(comm_mode), "tree": tree})


def check(comm_mode, device_mesh, dist_info, request, *, is_simulated=False):
    assert WIDTH % 4 == 0
    results = []
    values = {"comm_mode": comm_mode, "device_mesh": device_mesh, "dist_info": dist_info}
    drawn = settings(
        max_examples=EXAMPLES[dist_info.world_size],
        derandomize=True,  # all ranks and both backends have to draw the same
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # shrinking would take minutes of gloo ranks
    )(given(plan=PLANS)(run))
    drawn(**values, results=results, is_simulated=is_simulated)
    kind = "simulated" if is_simulated else dist_info.backend
    name = f"{kind}-{dist_info.world_size}-{dist_info.rank}.json"
    pathlib.Path(request.config.rootpath, name).write_text(json.dumps(results))


@gloo_and_fake(2)
def test_two_ranks_record_what_they_send(comm_mode, device_mesh, dist_info, request):
    check(comm_mode, device_mesh, dist_info, request)


@gloo_and_fake(4)
def test_four_ranks_record_what_they_send(comm_mode, device_mesh, dist_info, request):
    check(comm_mode, device_mesh, dist_info, request)


@gloo_and_fake(8)
def test_eight_ranks_record_what_they_send(comm_mode, device_mesh, dist_info, request):
    check(comm_mode, device_mesh, dist_info, request)


@pytest.mark.distributed(world_size=2, simulate=True, ranks=range(2))
def test_two_simulated_ranks_record_what_they_send(comm_mode, device_mesh, dist_info, request):
    check(comm_mode, device_mesh, dist_info, request, is_simulated=True)


@pytest.mark.distributed(world_size=4, simulate=True, ranks=range(4))
def test_four_simulated_ranks_record_what_they_send(comm_mode, device_mesh, dist_info, request):
    check(comm_mode, device_mesh, dist_info, request, is_simulated=True)


@pytest.mark.distributed(world_size=8, simulate=True, ranks=range(8))
def test_eight_simulated_ranks_record_what_they_send(comm_mode, device_mesh, dist_info, request):
    check(comm_mode, device_mesh, dist_info, request, is_simulated=True)
