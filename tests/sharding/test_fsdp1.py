"""FSDP1, DDP and ``replicate`` in the tree, against torch's own view of them."""

import importlib
import math
import warnings
from importlib import metadata

import pytest
import torch
import torch.distributed as dist
from models import Block, UnevenModel
from texts import format_tree
from torch.distributed._composable import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch_facts import HAS_DIVIDE_FACTOR

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.errors import UpstreamChangedError
from pytest_fsdp_comm.recording.owners.fsdp import groups_of_state
from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.tree.model import Precision

CPU = torch.device("cpu")
WORLD = 4


pytestmark = pytest.mark.usefixtures("four_ranks")


def wrapped(**options):
    with warnings.catch_warnings():
        # NO_SHARD and some strategies are deprecated; the warnings do not matter here.
        warnings.simplefilter("ignore")
        policy = ModuleWrapPolicy({Block})
        return Fsdp1(UnevenModel(), auto_wrap_policy=policy, device_id=CPU, **options)


def unit_of(tree, name):
    (index,) = (i for i in range(len(tree.units)) if tree.unit_name(i) == name)
    return tree.units[index]


@pytest.mark.upstream
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("run_first", [False, True])
def test_units_and_names_are_those_of_torch(use_orig_params, run_first):
    model = wrapped(use_orig_params=use_orig_params)
    if run_first:
        model(torch.ones(2, 5)).sum().backward()
    tree = capture_tree(model)
    expected = {}
    for wrapper in Fsdp1.fsdp_modules(model):
        name = next(name for name, module in model.named_modules() if module is wrapper)
        fqns = [f"{name}.{fqn}".lstrip(".") for fqn in wrapper._handle.flat_param._fqns]
        expected[clean_tensor_name(name)] = tuple(map(clean_tensor_name, fqns))
    assert tree.module_to_fqns == expected
    assert set(expected) == {"", "layers.0", "layers.1"}


def test_the_outline_has_no_wrappers():
    model = UnevenModel()
    for layer in model.layers:
        fully_shard(layer)
    tree = capture_tree(wrapped(use_orig_params=True))
    assert str(tree) == str(capture_tree(fully_shard(model)))


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_ranks_together_store_all_elements(use_orig_params):
    kept = []
    for rank in range(WORLD):
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=WORLD)
        tree = capture_tree(wrapped(use_orig_params=use_orig_params))
        kept.append({fqn: entry.local_numel for fqn, entry in tree.named_parameters()})
    for fqn, entry in tree.named_parameters():
        assert sum(numels[fqn] for numels in kept) == math.prod(entry.shape), fqn


def test_a_flat_parameter_is_padded_to_equal_shards():
    block = unit_of(capture_tree(wrapped(use_orig_params=False)), "layers.0")
    # 5*7 + 7 + 7*5 + 5 = 82 elements, padded to 84 on 4 ranks, in float32.
    assert (block.nbytes_gathered, block.nbytes_padding, block.nbytes_kept) == (336, 8, 84)


@pytest.mark.parametrize(
    ("strategy", "root", "block"),
    [
        (ShardingStrategy.FULL_SHARD, False, True),
        (ShardingStrategy.SHARD_GRAD_OP, False, False),
        (ShardingStrategy.NO_SHARD, None, None),
    ],
)
def test_strategy_sets_reshard_after_forward(strategy, root, block):
    tree = capture_tree(wrapped(sharding_strategy=strategy, use_orig_params=True))
    assert unit_of(tree, "").reshard_after_forward is root
    assert unit_of(tree, "layers.0").reshard_after_forward is block
    assert tree.is_sharded == (block is not None)
    assert ("FULLY SHARDED" in str(tree)) == tree.is_sharded


def test_hybrid_sharding_has_shard_and_replicate_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    tree = capture_tree(
        wrapped(
            sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh, use_orig_params=True
        )
    )
    block = unit_of(tree, "layers.0")
    assert block.shard_axis == MeshAxis(name="shard", size=2, dims=((2, 1),))
    assert block.replicate_axis == MeshAxis(name="replica", size=2, dims=((2, 2),))
    entry = dict(tree.named_parameters())["layers.0.up.weight"]
    assert [placement.text for placement in entry.placements] == ["Replicate()", "FlatShard()"]


def test_no_shard_on_one_rank_replicates_over_itself():
    # pytorch 154888: FSDP1 makes it NO_SHARD, and reduces over the group of shards alone.
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("replica", "shard"))
    tree = capture_tree(wrapped(sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_mesh=mesh))
    block = unit_of(tree, "layers.0")
    assert (block.shard_axis, block.replicate_axis.size) == (None, 1)


def test_unit_precision_and_prefetch_are_read():
    tree = capture_tree(
        wrapped(
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.float32),
            backward_prefetch=BackwardPrefetch.BACKWARD_POST,
            forward_prefetch=True,
            use_orig_params=True,
        )
    )
    block = unit_of(tree, "layers.0")
    assert block.precision == Precision(param_dtype="bfloat16", buffer_dtype="float32")
    assert block.prefetch == "BACKWARD_POST FORWARD"
    # use_orig_params aligns each parameter to 16 bytes: 40 + 8 + 40 + 5 elements, padded to 96.
    assert block.nbytes_gathered == 2 * 96
    assert "prefetch=BACKWARD_POST,FORWARD" in format_tree(tree)


def test_tied_parameters_keep_both_names():
    tree = capture_tree(wrapped(use_orig_params=False))
    index = [fqn for fqn, _ in tree.named_parameters()].index("head.weight")
    assert tree.tied_fqns(index) == ("head_twin.weight",)
    assert len(tree.parameters) == 5 + 2 * 4


def test_ddp_is_one_replicated_unit():
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = DistributedDataParallel(UnevenModel())
    tree = capture_tree(model)
    assert str(tree).splitlines()[:2] == ["[UnevenModel] REPLICATED", "    embed[Linear]"]
    (unit,) = tree.units
    assert (unit.kind, unit.replicate_axis) == ("ddp", MeshAxis(name="world", size=1))
    assert len(tree.module_to_fqns[""]) == len(list(model.parameters()))
    assert tree.is_distributed
    assert not tree.is_sharded
    assert not capture_tree(UnevenModel()).is_distributed


def test_replicate_is_a_unit_before_its_first_forward():
    model = UnevenModel()
    replicate(model.layers)
    tree = capture_tree(model)
    (unit,) = tree.units
    assert tree.unit_name(0) == "layers"
    assert unit.replicate_axis == MeshAxis(name="world", size=WORLD, dims=((WORLD, 1),))
    assert "    layers[Sequential] REPLICATED\n" in str(tree)
    assert dict(tree.named_parameters())["head.weight"].unit is None


def test_replicate_built_on_fsdp2_is_a_replicated_unit():
    module = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp")
    model = UnevenModel()
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",))
    module.replicate(model.layers, mesh=mesh)
    tree = capture_tree(model)
    (unit,) = tree.units
    assert (unit.kind, unit.shard_axis) == ("replicate", None)
    assert unit.replicate_axis == MeshAxis(name="dp", size=WORLD, dims=((WORLD, 1),))
    assert unit.nbytes_gathered == 0
    assert unit.reshard_after_forward is None
    assert "    layers[Sequential] REPLICATED\n" in str(tree)


@pytest.mark.upstream
def test_the_private_names_are_where_they_were_read():
    """Fails, naming the place, when an upgrade of torch moves what the readers rely on."""
    walk = importlib.import_module("torch.distributed._composable.replicate")
    assert hasattr(walk, "DDP")
    assert hasattr(walk.replicate, "state")
    wrapper, block = wrapped(use_orig_params=True), fully_shard(Block())
    (group,) = groups_of_state(block._get_fsdp_state())
    param = group.fsdp_params[0]
    read = (
        (wrapper, "_handle _is_root _device_mesh process_group sharding_strategy"),
        (
            wrapper._handle,
            "flat_param uses_sharded_strategy _fwd_bwd_param_dtype _orig_param_dtype",
        ),
        (
            wrapper._handle.flat_param,
            "_param_infos _shared_param_infos _shapes _numels _shard_param_infos _sharded_size "
            "_params _is_flat_param",
        ),
        (
            block._get_fsdp_state(),
            "_modules _is_root _states_to_forward_prefetch _states_to_backward_prefetch",
        ),
        (
            group,
            "fsdp_params mesh_info post_forward_mesh_info offload_policy unshard_in_backward"
            + HAS_DIVIDE_FACTOR * " gradient_divide_factor force_sum_reduction_for_comms",
        ),
        (
            param,
            "_module_info sharded_param sharded_state _orig_size padded_sharded_param_size",
        ),
    )
    missing = [name for own, names in read for name in names.split() if not hasattr(own, name)]
    assert missing == []
    # On the group until torch 2.14, on each parameter since.
    assert hasattr(group, "mp_policy") or hasattr(param, "mp_policy")


@pytest.mark.upstream
def test_a_private_name_that_moved_is_named():
    block = fully_shard(Block())
    (group,) = groups_of_state(block._get_fsdp_state())
    del group.offload_policy
    with pytest.raises(UpstreamChangedError) as caught:
        capture_tree(block)
    assert str(caught.value) == (
        f"torch {metadata.version('torch')} changed a private name of FSDP2 that fsdp_tree reads "
        "('FSDPParamGroup' object has no attribute 'offload_policy'); pytest-fsdp-comm was written "
        "for torch 2.7 to 2.15: use one of these versions, or upgrade pytest-fsdp-comm"
    )
    model = wrapped(use_orig_params=True)
    del model._handle._fwd_bwd_param_dtype
    with pytest.raises(UpstreamChangedError, match=r"of FSDP1 that fsdp_tree reads \('FlatParamHa"):
        capture_tree(model)
