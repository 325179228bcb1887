"""The cost of changes to FSDP: bytes of recorded steps, computed by hand."""

import pytest
from models import BLOCK_NBYTES, LINEAR_NBYTES, ROOT_NBYTES, Model, shard, step
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm.comm.cost import cost_of_change
from pytest_fsdp_comm.reports.cost_lines import cost_lines

pytestmark = pytest.mark.distributed(world_size=4, backend="fake", scope="module")


@pytest.fixture
def record(comm_mode):
    """Records a step in a settled state."""

    def record(model, run=step):
        run(model)
        with comm_mode(model):
            run(model)
        return comm_mode.profile

    return record


def nbytes(cost):
    """Bytes of both sides by kind and axis."""
    return {
        f"{one.kind}[{one.axis}]": (one.before.nbytes, one.after.nbytes) for one in cost.collectives
    }


def test_reduction_per_micro_batch_multiplies_bytes(record, device_mesh):
    def train(model, *, sync_each):
        for n in range(4):
            model.set_requires_gradient_sync(sync_each or n == 3)
            step(model)

    model = shard(Model(), device_mesh())
    reviewed = record(model, lambda model: train(model, sync_each=False))
    regressed = record(model, lambda model: train(model, sync_each=True))
    cost = cost_of_change(reviewed, regressed)
    # In each batch the root is gathered once, 2 blocks twice.
    gathered = 4 * (ROOT_NBYTES + 2 * 2 * BLOCK_NBYTES)
    reduced = ROOT_NBYTES + 2 * BLOCK_NBYTES
    assert nbytes(cost) == {
        "all_gather[dp]": (gathered, gathered),
        "reduce_scatter[dp]": (reduced, 4 * reduced),
    }
    assert (cost.peak_before, cost.peak_after) == (ROOT_NBYTES + 2 * BLOCK_NBYTES,) * 2
    assert cost_lines(cost) == (
        "x4.0 bytes in reduce_scatter[dp] (1.5 -> 6.0 KiB per rank), +39 % in all",
    )


def test_blocks_kept_gathered_cost_memory_not_bytes(record, device_mesh):
    # The root is gathered for both phases; 4 blocks are freed after forward, or not.
    reviewed = record(shard(Model(blocks=4), device_mesh()))
    kept = record(shard(Model(blocks=4), device_mesh(), reshard_after_forward=False))
    cost = cost_of_change(reviewed, kept)
    reduced = ROOT_NBYTES + 4 * BLOCK_NBYTES
    assert nbytes(cost) == {
        "all_gather[dp]": (ROOT_NBYTES + 8 * BLOCK_NBYTES, ROOT_NBYTES + 4 * BLOCK_NBYTES),
        "reduce_scatter[dp]": (reduced, reduced),
    }
    # Gathered at once: the root, a block and the prefetched block; or everything.
    assert (cost.peak_before, cost.peak_after) == (3 * 512, 5 * 512)
    assert cost_lines(cost) == (
        "-44 % bytes in all_gather[dp] (4.5 -> 2.5 KiB per rank), -29 % in all, "
        "peak gathered +67 % (1.5 -> 2.5 KiB per rank)",
    )


def test_hsdp_reduces_shards_over_replicate_axis(record, device_mesh):
    def train(model, *, sync_each):
        for n in range(2):
            model.set_requires_all_reduce(sync_each or n == 1)
            step(model)

    model = shard(Model(), device_mesh(replicate=2, shard=2))
    reviewed = record(model, lambda model: train(model, sync_each=False))
    regressed = record(model, lambda model: train(model, sync_each=True))
    cost = cost_of_change(reviewed, regressed)
    units = ROOT_NBYTES + 2 * BLOCK_NBYTES
    gathered = 2 * (units + 2 * BLOCK_NBYTES)
    assert nbytes(cost) == {
        "all_gather[shard]": (gathered, gathered),
        "reduce_scatter[shard]": (2 * units, 2 * units),
        # Between 2 shards each has half.
        "all_reduce[replicate]": (units // 2, 2 * (units // 2)),
    }
    assert [(axis.axis, axis.after.nbytes - axis.before.nbytes) for axis in cost.axes] == [
        ("replicate", units // 2),
        ("shard", 0),
    ]
    assert cost_lines(cost) == (
        "+100 % bytes in all_reduce[replicate] (768 B -> 1.5 KiB per rank), +8.6 % in all",
    )


def test_split_unit_sends_same_bytes_in_more_calls(record, device_mesh):
    def build(*, split):
        model = Model()
        if split:
            fully_shard(model.head, mesh=device_mesh(), reshard_after_forward=False)
        return shard(model, device_mesh())

    cost = cost_of_change(record(build(split=False)), record(build(split=True)))
    gathered = ROOT_NBYTES + 4 * BLOCK_NBYTES
    reduced = ROOT_NBYTES + 2 * BLOCK_NBYTES
    assert nbytes(cost) == {
        "all_gather[dp]": (gathered, gathered),
        "reduce_scatter[dp]": (reduced, reduced),
    }
    # At once: the root and both blocks; the head is freed before the second is gathered.
    assert (cost.peak_before, cost.peak_after) == (3 * 512, 3 * 512 - LINEAR_NBYTES)
    assert cost_lines(cost) == (
        "bytes unchanged, 2 calls more in all (8 -> 10 per rank), peak gathered -17 % "
        "(1.5 -> 1.2 KiB per rank)",
        "all_gather[dp] 5 -> 6 calls, reduce_scatter[dp] 3 -> 4 calls",
    )


def test_a_llama_sends_what_its_parameters_have(record, device_mesh):
    pytest.importorskip("transformers")
    import tiny_llama  # needs transformers

    def sharded(**policy):
        model = tiny_llama.build()
        for layer in model.model.layers:
            fully_shard(layer, mesh=device_mesh(), **policy)
        return fully_shard(model, mesh=device_mesh())

    def train(model):
        tiny_llama.loss(model).backward()

    reviewed = record(sharded(), train)
    cost = cost_of_change(reviewed, record(sharded(reshard_after_forward=False), train))
    # Embedding, head and last norm are the root's: 2 * 128 * 64 + 64 float32. A layer has 4
    # matrices of 64 * 64, 3 of 64 * 128 and 2 norms of 64.
    assert nbytes(cost) == {
        "all_gather[dp]": (65_792 + 4 * 164_352, 65_792 + 2 * 164_352),
        "reduce_scatter[dp]": (394_496, 394_496),
    }
    assert cost_lines(cost)[0].startswith(
        "-45 % bytes in all_gather[dp] (706.2 -> 385.2 KiB per rank), -29 % in all"
    )
