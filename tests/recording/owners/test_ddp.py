"""DDP and `replicate`: the reducer, its buckets and its communication hooks own what they send."""

import pytest
import torch
import torch.distributed as dist
from models import BLOCK_NBYTES, LINEAR_NBYTES, ROOT_NBYTES, WIDTH, Model, shard, step
from oracle import gloo_and_fake, lines, witnessed, witnessed_twice
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

MODEL = ROOT_NBYTES + 2 * BLOCK_NBYTES
# In MiB: each bucket is closed by the second matrix.
TWO_MATRICES = 0.0004

ws2 = pytest.mark.distributed(world_size=2)

# A bucket is sent when its last gradient is there, in whose module it is issued.
BUCKETS = [
    f"backward . all_reduce[world] {2 * LINEAR_NBYTES} < {module}"
    for module in ("layers.1.down", "layers.0.down", "embed")
]
# How many matrices are in each bucket, then how many buckets there are: int32.
REBUILDS = ["forward . broadcast[world] 28 < .", "forward . broadcast[world] 12 < ."]


def sources(comm_mode):
    return {event.source.value for event in comm_mode.events}


@pytest.mark.upstream
@ws2
def test_each_bucket_is_one_all_reduce_after_two_steps(comm_mode):
    model = DistributedDataParallel(Model(), bucket_cap_mb=TWO_MATRICES)
    witnessed(comm_mode, model, lambda: step(model), warm_up=2)
    assert lines(comm_mode) == BUCKETS
    assert sources(comm_mode) == {"ddp"}
    with comm_mode:
        step(model)
    assert lines(comm_mode) == BUCKETS


@ws2
def test_buckets_are_rebuilt_in_the_second_step(comm_mode):
    model = DistributedDataParallel(Model(), bucket_cap_mb=TWO_MATRICES)

    def three_steps():
        for _ in range(3):
            step(model)

    witnessed(comm_mode, model, three_steps, profiler=False)
    # The first bucket of the first step has room for all.
    first = f"backward . all_reduce[world] {MODEL} < embed"
    assert lines(comm_mode) == [first, *REBUILDS, *BUCKETS, *BUCKETS]
    assert sources(comm_mode) == {"ddp"}


@ws2
def test_a_static_graph_reduces_the_same_buckets(comm_mode):
    model = DistributedDataParallel(Model(), static_graph=True, bucket_cap_mb=TWO_MATRICES)
    # Rebuilt one step later than otherwise.
    witnessed(comm_mode, model, lambda: step(model), warm_up=3)
    assert lines(comm_mode) == BUCKETS


@ws2
@pytest.mark.parametrize("is_hooked", [False, True])
def test_unused_parameter_map_is_not_gradients(comm_mode, is_hooked):
    def rounded(_state, bucket):
        sent = bucket.buffer().mul(1000).to(torch.int32)
        work = dist.all_reduce(sent, async_op=True)
        return work.get_future().then(lambda done: done.value()[0].to(torch.float32))

    model = DistributedDataParallel(Model(), find_unused_parameters=True)
    if is_hooked:
        model.register_comm_hook(None, rounded)
    witnessed_twice(comm_mode, model, lambda: step(model), warm_up=2)
    gradients, used = comm_mode.events
    dtype = "int32" if is_hooked else "float32"
    assert (gradients.nbytes, gradients.dtype, gradients.role) == (MODEL, dtype, "gradients")
    # An int32 for each parameter: the two of the root, and two in each layer.
    assert (used.nbytes, used.dtype, used.role) == (6 * 4, "int32", "unused parameters")
    assert "x1 of 24 B int32 unused parameters async" in str(comm_mode)


@ws2
def test_no_sync_reduces_in_the_last_micro_batch_only(comm_mode):
    model = DistributedDataParallel(Model())

    def two_micro_batches():
        with model.no_sync():
            step(model)
        step(model)

    witnessed(comm_mode, model, two_micro_batches, warm_up=2)
    assert lines(comm_mode) == [f"backward . all_reduce[world] {MODEL} < embed"]


@ws2
def test_buffers_are_broadcast_in_forward(comm_mode):
    model = DistributedDataParallel(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)))
    witnessed(comm_mode, model, lambda: step(model), warm_up=3)
    assert lines(comm_mode) == [
        # Mean and variance; the number of batches, an int64.
        f"forward . broadcast[world] {2 * WIDTH * 4} < .",
        "forward . broadcast[world] 8 < .",
        f"backward . all_reduce[world] {LINEAR_NBYTES + 3 * WIDTH * 4} < 0",
    ]
    assert sources(comm_mode) == {"ddp"}
    assert [event.role for event in comm_mode.events] == ["buffers", "buffers", "gradients"]


@ws2
def test_counts_of_join_and_its_last_model_have_no_role(comm_mode):
    model = DistributedDataParallel(Model())
    step(model)
    step(model)
    with comm_mode(model), Join([model]):
        step(model)
    sent = {(event.kind, event.phase.value, event.role) for event in comm_mode.events}
    assert sent == {
        ("all_reduce", "backward", "gradients"),
        # How many ranks have inputs left, the rank with the last model, and that model.
        ("all_reduce", "forward", None),
        ("all_reduce", "outside", None),
        ("broadcast", "outside", None),
    }


@pytest.mark.upstream
@ws2
def test_a_communication_hook_sends_what_it_compressed(comm_mode):
    def halved(_state, bucket):
        sent = bucket.buffer().to(torch.bfloat16)
        work = dist.all_reduce(sent, async_op=True)
        return work.get_future().then(lambda done: done.value()[0].to(torch.float32))

    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, halved)
    witnessed(comm_mode, model, lambda: step(model), warm_up=2)
    assert lines(comm_mode) == [f"backward . all_reduce[world] {MODEL // 2} < embed"]
    assert sources(comm_mode) == {"ddp"}


@ws2
def test_collectives_that_a_hook_chains_belong_to_ddp(comm_mode):
    # The second one runs at once or on a thread of the backend, whichever comes first.
    def twice(_state, bucket):
        def again(done):
            dist.all_reduce(torch.zeros(3))
            return done.value()[0]

        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(again)

    model = DistributedDataParallel(Model())
    model.register_comm_hook(None, twice)
    # The profiler does not see the thread.
    witnessed(comm_mode, model, lambda: [step(model) for _ in range(20)], warm_up=2, profiler=False)
    both = [f"backward . all_reduce[world] {nbytes} < embed" for nbytes in (MODEL, 12)]
    assert lines(comm_mode) == both * 20
    assert sources(comm_mode) == {"ddp"}
    assert comm_mode.recording.notes == ()


@ws2
def test_replicate_reduces_as_ddp_does(comm_mode):
    model = Model()
    replicate(model)
    witnessed(comm_mode, model, lambda: step(model), warm_up=3)
    assert lines(comm_mode) == [f"backward . all_reduce[world] {MODEL} < embed"]
    assert sources(comm_mode) == {"ddp"}


@ws2
def test_each_replica_in_one_model_owns_its_all_reduce(comm_mode):
    parts = [DistributedDataParallel(Model()) for _ in range(2)]
    model = nn.Sequential(*parts)
    witnessed(comm_mode, model, lambda: step(model), warm_up=3)
    assert lines(comm_mode) == [
        f"backward 1 all_reduce[world] {MODEL} < 1.embed",
        f"backward 0 all_reduce[world] {MODEL} < 0.embed",
    ]


@ws2
def test_replica_next_to_sharded_part_owns_its_events(comm_mode, device_mesh):
    model = nn.Sequential(DistributedDataParallel(Model()), shard(Model(), device_mesh()))
    witnessed(comm_mode, model, lambda: step(model), warm_up=3)
    by_source = {}
    for event in comm_mode.events:
        by_source.setdefault(event.source.value, set()).add(event.owner)
    assert by_source == {"ddp": {"0"}, "fsdp": {"1", "1.layers.0", "1.layers.1"}}


@gloo_and_fake(2)
def test_collective_of_parameter_hook_owned_by_module(comm_mode):
    # Hand-written data parallelism: the owner is the parameter's module.
    model = Model(blocks=1)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda done: dist.all_reduce(done.grad))
    witnessed(comm_mode, model, lambda: step(model))
    assert lines(comm_mode) == [
        f"backward {name} all_reduce[world] {LINEAR_NBYTES} < {name}"
        for name in ("head", "layers.0.down", "layers.0.up", "embed")
    ]
    assert sources(comm_mode) == {"user"}


@ws2
# torch's own optimizers still script functions.
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_zero_optimizer_broadcasts_updated_parts(comm_mode):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(Model(blocks=1))
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)

    def train():
        step(model)
        optimizer.step()

    witnessed(comm_mode, model, train, warm_up=2)
    # Each rank updates its part and sends it to the others.
    assert comm_mode.counts("broadcast", phase="optimizer") == 4
    assert comm_mode.nbytes("broadcast", phase="optimizer") == ROOT_NBYTES + BLOCK_NBYTES
