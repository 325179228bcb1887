"""FSDP1 in all its settings. Recorded in a second step, since the first gathers nothing of torch's
forward prefetch and initialises lazily."""

import pytest
import torch
import torch.distributed as dist
from models import BLOCK_NBYTES, LINEAR_NBYTES, ROOT_NBYTES, Block, Model, step
from oracle import gloo_and_fake, lines, witnessed
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

BLOCK, ROOT = BLOCK_NBYTES, ROOT_NBYTES


def wrap(**options):
    return FullyShardedDataParallel(
        Model(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        **options,
    )


def forward(axis="world"):
    return [
        f"forward . all_gather[{axis}] {ROOT} < .",
        f"forward layers.0 all_gather[{axis}] {BLOCK} < layers.0",
        f"forward layers.1 all_gather[{axis}] {BLOCK} < layers.1",
    ]


# Without backward prefetch each unit gathers in its own pre-backward hook.
BACKWARD_GATHERS = [
    f"backward layers.1 all_gather[world] {BLOCK} < layers.1",
    f"backward layers.0 all_gather[world] {BLOCK} < layers.0",
]
REDUCES = [
    f"backward layers.1 reduce_scatter[world] {BLOCK} < layers.1",
    f"backward layers.0 reduce_scatter[world] {BLOCK} < layers.0",
    f"backward . reduce_scatter[world] {ROOT} < .",
]


@gloo_and_fake(2)
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("FULL_SHARD", [*forward(), *BACKWARD_GATHERS, *REDUCES]),
        ("SHARD_GRAD_OP", [*forward(), *REDUCES]),
        ("NO_SHARD", [line.replace("reduce_scatter", "all_reduce") for line in REDUCES]),
    ],
)
# torch itself warns of NO_SHARD, which is to be replaced by DDP.
@pytest.mark.filterwarnings("ignore:.*NO_SHARD:FutureWarning")
def test_each_strategy_sends_what_torch_documents(comm_mode, strategy, expected, use_orig_params):
    model = wrap(
        sharding_strategy=getattr(ShardingStrategy, strategy),
        use_orig_params=use_orig_params,
        backward_prefetch=None,
    )
    witnessed(comm_mode, model, lambda: step(model), warm_up=1)
    assert sorted(lines(comm_mode)) == sorted(expected)
    assert [line for line in lines(comm_mode) if line.startswith("forward")] == [
        line for line in expected if line.startswith("forward")
    ]


HYBRID_REDUCES = [
    line
    for owner, nbytes in (("layers.1", BLOCK), ("layers.0", BLOCK), (".", ROOT))
    for line in (
        f"backward {owner} reduce_scatter[shard] {nbytes} < {owner}",
        f"backward {owner} all_reduce[replicate] {nbytes // 2} < {owner}",
    )
]


@gloo_and_fake(4)
@pytest.mark.parametrize(
    ("strategy", "backward_gathers"),
    [
        ("HYBRID_SHARD", [line.replace("world", "shard") for line in BACKWARD_GATHERS]),
        ("_HYBRID_SHARD_ZERO2", []),
    ],
)
def test_hybrid_sharding_reduces_over_both_axes(comm_mode, device_mesh, strategy, backward_gathers):
    model = wrap(
        sharding_strategy=getattr(ShardingStrategy, strategy),
        device_mesh=device_mesh(replicate=2, shard=2),
        backward_prefetch=None,
    )
    witnessed(comm_mode, model, lambda: step(model), warm_up=1)
    assert [line for line in lines(comm_mode) if "gather" in line] == [
        *forward("shard"),
        *backward_gathers,
    ]
    assert [line for line in lines(comm_mode) if "reduce" in line] == HYBRID_REDUCES


@pytest.mark.upstream
@pytest.mark.distributed(world_size=4)
def test_group_without_mesh_is_named_by_shape(comm_mode, dist_info):
    shard = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist_info.rank // 2]
    replicate = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])][dist_info.rank % 2]
    model = wrap(sharding_strategy=ShardingStrategy.HYBRID_SHARD, process_group=(shard, replicate))
    witnessed(comm_mode, model, lambda: step(model), warm_up=1)
    # Named by their shape, which is the same on every rank.
    assert {(event.kind, event.axis) for event in comm_mode.events} == {
        ("all_gather", "size2.stride1"),
        ("reduce_scatter", "size2.stride1"),
        ("all_reduce", "size2.stride2"),
    }


@pytest.mark.upstream
@gloo_and_fake(2)
def test_no_sync_gathers_per_micro_batch_reduces_once(comm_mode):
    model = wrap(backward_prefetch=None)

    def two_micro_batches():
        with model.no_sync():
            step(model)
        step(model)

    witnessed(comm_mode, model, two_micro_batches, warm_up=1)
    assert comm_mode.counts("all_gather") == 2 * 5
    assert [line for line in lines(comm_mode) if "reduce" in line] == REDUCES


@gloo_and_fake(2)
@pytest.mark.parametrize(
    ("prefetch", "issued_in"),
    [
        # Before the gradients of the unit are computed; after; not at all.
        (BackwardPrefetch.BACKWARD_PRE, "layers.1"),
        (BackwardPrefetch.BACKWARD_POST, "layers.1"),
        (None, "layers.0"),
    ],
    ids=["pre", "post", "none"],
)
def test_backward_prefetch_sets_issuing_unit(comm_mode, prefetch, issued_in):
    model = wrap(backward_prefetch=prefetch)
    witnessed(comm_mode, model, lambda: step(model), warm_up=1)
    gathers = [line for line in lines(comm_mode) if line.startswith("backward layers.0 all_gather")]
    assert gathers == [f"backward layers.0 all_gather[world] {BLOCK} < {issued_in}"]


@gloo_and_fake(2)
def test_forward_prefetch_gathers_in_previous_block(comm_mode):
    model = wrap(forward_prefetch=True)
    witnessed(comm_mode, model, lambda: step(model), warm_up=1)
    assert [line for line in lines(comm_mode) if line.startswith("forward")] == [
        f"forward . all_gather[world] {ROOT} < .",
        f"forward layers.0 all_gather[world] {BLOCK} < .",
        f"forward layers.1 all_gather[world] {BLOCK} < layers.0",
    ]


@gloo_and_fake(2)
def test_summon_full_params_gathers_each_unit_once(comm_mode):
    model = wrap(use_orig_params=True)
    step(model)

    def summon():
        with FullyShardedDataParallel.summon_full_params(model):
            pass
        with FullyShardedDataParallel.summon_full_params(model.layers[0]):
            pass

    witnessed(comm_mode, model, summon)
    assert lines(comm_mode) == [
        f"outside . all_gather[world] {ROOT} < -",
        f"outside layers.0 all_gather[world] {BLOCK} < -",
        f"outside layers.1 all_gather[world] {BLOCK} < -",
        f"outside layers.0 all_gather[world] {BLOCK} < -",
    ]
    assert [e.action for e in comm_mode.reshards].count("reshard") == 4


@pytest.mark.distributed(world_size=2)
@pytest.mark.parametrize(
    ("kind", "counts"),
    [
        # The three units to save, and again to load.
        ("FULL_STATE_DICT", {"fsdp": 6}),
        # One object of metadata for each unit: its size, then itself.
        ("LOCAL_STATE_DICT", {"object": 6}),
        # As above; before it loads a unit, it gathers each of its matrices by itself.
        ("SHARDED_STATE_DICT", {"fsdp": 6, "user": 6}),
    ],
)
# torch deprecates FSDP1's own state dicts.
@pytest.mark.filterwarnings("ignore:.*state_dict:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*ShardedTensor:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*_get_pg_default_device:UserWarning")
@pytest.mark.filterwarnings("ignore:Multiple backends are registered:UserWarning")
def test_each_kind_of_state_dict_has_its_own_sources(comm_mode, kind, counts):
    model = wrap()
    step(model)

    def save_and_load():
        with FullyShardedDataParallel.state_dict_type(model, getattr(StateDictType, kind)):
            model.load_state_dict(model.state_dict())

    witnessed(comm_mode, model, save_and_load)
    sources = [event.source.value for event in comm_mode.events]
    assert {source: sources.count(source) for source in sources} == counts
    assert {event.phase.value for event in comm_mode.events} == {"outside"}


@pytest.mark.upstream
@gloo_and_fake(2)
def test_clipping_all_reduces_one_norm(comm_mode):
    model = wrap()
    step(model)
    witnessed(comm_mode, model, lambda: model.clip_grad_norm_(1.0))
    assert lines(comm_mode) == ["optimizer - all_reduce[world] 4 < -"]


@gloo_and_fake(2)
def test_a_wrapper_alone_is_the_root(comm_mode):
    model = FullyShardedDataParallel(Block(), device_id=torch.device("cpu"))
    witnessed(comm_mode, model, lambda: step(model), warm_up=1)
    assert {event.owner for event in comm_mode.events} == {""}
    assert comm_mode.nbytes("reduce_scatter") == 2 * LINEAR_NBYTES
