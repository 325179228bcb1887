"""The captured tree against hand-written expectations, on simulated ranks."""

import inspect

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Block, TokenModel
from texts import format_tree, parse_tree
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch_facts import HAS_DIVIDE_FACTOR

from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.recording.comm_mode import CommMode
from pytest_fsdp_comm.recording.owners.fsdp import groups_of_state
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames
from pytest_fsdp_comm.sharding import units
from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.tree.model import Precision, dump_tree, load_tree
from pytest_fsdp_comm.tree.profile import tree_facts


def sharded(model=None, **policy):
    model = TokenModel() if model is None else model
    for layer in model.layers:
        fully_shard(layer, **policy)
    return fully_shard(model, **policy)


# Until torch 2.7 a root always kept its parameters, and reshard_after_forward took no None.
LEAVES_IT_TO_TORCH = (
    inspect.signature(fully_shard).parameters["reshard_after_forward"].default is None
)
needs_none = pytest.mark.skipif(
    not LEAVES_IT_TO_TORCH, reason="this torch takes no reshard_after_forward=None"
)


def unit_of(tree, name):
    (index,) = (i for i in range(len(tree.units)) if tree.unit_name(i) == name)
    return tree.units[index]


def parameter(tree, fqn):
    return dict(tree.named_parameters())[fqn]


def placements(tree, fqn):
    return [(entry.axis, entry.text) for entry in parameter(tree, fqn).placements]


pytestmark = pytest.mark.usefixtures("four_ranks")


def test_blocks_and_root_are_units_with_parameters():
    tree = capture_tree(sharded())
    assert str(tree) == (
        "[TokenModel] FULLY SHARDED\n"
        "    embed[Embedding]\n"
        "    layers[ModuleList]\n"
        "        layers.0[Block] FULLY SHARDED\n"
        "            layers.0.up[Linear]\n"
        "            layers.0.down[Linear]\n"
        "        layers.1[Block] FULLY SHARDED\n"
        "            layers.1.up[Linear]\n"
        "            layers.1.down[Linear]\n"
        "    head[Linear]"
    )
    assert tree.module_to_fqns == {
        "": ("embed.weight", "head.weight"),
        "layers.0": (
            "layers.0.up.weight",
            "layers.0.up.bias",
            "layers.0.down.weight",
            "layers.0.down.bias",
        ),
        "layers.1": (
            "layers.1.up.weight",
            "layers.1.up.bias",
            "layers.1.down.weight",
            "layers.1.down.bias",
        ),
    }
    assert (tree.world_size, tree.mesh_axes) == (
        4,
        (MeshAxis(name="world", size=4, dims=((4, 1),)),),
    )
    assert tree.is_sharded
    root, block = unit_of(tree, ""), unit_of(tree, "layers.0")
    assert (root.is_root, root.reshard_after_forward) == (True, False)
    assert (block.is_root, block.reshard_after_forward) == (False, True)
    # up 16x8 + 16, down 8x16 + 8, in float32; every first dimension divides by 4.
    assert block.nbytes_gathered == 4 * (128 + 16 + 128 + 8)
    assert (block.nbytes_padding, block.nbytes_kept) == (0, block.nbytes_gathered // 4)


@pytest.mark.parametrize(
    ("asked", "root", "block"),
    [
        (True, True, True),
        (False, False, False),
        pytest.param(None, False, True, marks=needs_none),
        (2, 2, 2),
        (4, True, True),
    ],
)
def test_reshard_after_forward_is_the_effective_value(asked, root, block):
    tree = capture_tree(sharded(reshard_after_forward=asked))
    assert unit_of(tree, "").reshard_after_forward == (root if LEAVES_IT_TO_TORCH else False)
    assert unit_of(tree, "layers.1").reshard_after_forward == block


def test_reshard_after_forward_set_later_is_seen():
    model = sharded()
    if not hasattr(model, "set_reshard_after_forward"):
        pytest.skip("this torch cannot set it later")
    model.layers[1].set_reshard_after_forward(False)
    tree = capture_tree(model)
    assert unit_of(tree, "layers.0").reshard_after_forward is True
    assert unit_of(tree, "layers.1").reshard_after_forward is False


def test_without_a_root_each_block_is_one():
    model = TokenModel()
    for layer in model.layers:
        fully_shard(layer)
    tree = capture_tree(model)
    assert [(unit.is_root, unit.reshard_after_forward) for unit in tree.units] == [
        (True, False),
        (True, False),
    ]
    assert parameter(tree, "embed.weight").unit is None
    assert not parameter(tree, "embed.weight").is_sharded


@pytest.mark.parametrize("reshard", [True, False, pytest.param(None, marks=needs_none), 2])
def test_running_the_model_does_not_change_its_tree(reshard):
    model = sharded(TokenModel(tied=True), reshard_after_forward=reshard)
    before = capture_tree(model)
    tokens = torch.zeros(4, dtype=torch.long)
    loss = model(tokens).sum()
    assert format_tree(capture_tree(model)) == format_tree(before)  # partly unsharded
    loss.backward()
    assert capture_tree(model) == before


def test_capture_dispatches_and_initializes_nothing():
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(f"the capture called {func}")

    model = sharded()
    with Refuse():
        tree = capture_tree(model)
    assert tree.is_sharded
    states = [model._get_fsdp_state(), model.layers[0]._get_fsdp_state()]
    assert [state._is_root for state in states] == [None, None]
    assert groups_of_state(states[0])[0]._module_fqn is None


def test_hsdp_has_a_shard_axis_and_a_replicate_axis():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    tree = capture_tree(sharded(mesh=mesh))
    block = unit_of(tree, "layers.0")
    assert block.shard_axis == MeshAxis(name="shard", size=2, dims=((2, 1),))
    assert block.replicate_axis == MeshAxis(name="replica", size=2, dims=((2, 2),))
    assert placements(tree, "layers.0.up.bias") == [
        ("replica", "Replicate()"),
        ("shard", "Shard(0)"),
    ]
    assert parameter(tree, "layers.0.up.bias").local_numel == 8


def test_tensor_parallelism_alone_shards_without_units():
    model = Block(8, 16, bias=True)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    tree = capture_tree(model)
    assert not tree.units
    assert tree.is_sharded
    assert placements(tree, "up.weight") == [("tp", "Shard(0)")]
    assert placements(tree, "down.weight") == [("tp", "Shard(1)")]
    assert placements(tree, "down.bias") == [("tp", "Replicate()")]
    assert parameter(tree, "down.weight").local_numel == 8 * 16 // 4


def test_fsdp_with_tensor_parallel_has_two_placements():
    model = Block(8, 16, bias=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    tree = capture_tree(model)
    assert placements(tree, "up.weight") == [("dp", "StridedShard(0,2)"), ("tp", "Shard(0)")]
    assert placements(tree, "down.weight") == [("dp", "Shard(0)"), ("tp", "Shard(1)")]
    # This rank's half of each weight and of up.bias, and down.bias whole.
    assert tree.units[0].nbytes_gathered == 4 * (64 + 8 + 64 + 8)


def test_partial_and_unknown_placements_round_trip():
    class Odd(Placement):
        pass

    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Module()
    model.sum = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Partial()]))
    model.odd = nn.Parameter(DTensor.from_local(torch.ones(4), mesh, [Replicate()]))
    model.odd._spec.placements = (Odd(),)
    tree = capture_tree(model)
    assert placements(tree, "sum") == [("tp", "Partial(sum)")]
    assert placements(tree, "odd") == [("tp", "Odd()")]
    assert not tree.is_sharded
    assert parse_tree(format_tree(tree)) == tree_facts(tree)


@st.composite
def plans(draw):
    """A model of nested modules, and which of them become units."""
    shapes = st.tuples(st.integers(1, 9), st.integers(1, 5))
    model = nn.Module()
    modules = [("", model)]
    for number in range(draw(st.integers(1, 7))):
        parent_fqn, parent = draw(st.sampled_from(modules))
        child = nn.Module()
        for name in draw(st.sets(st.sampled_from(["weight", "bias"]))):
            child.register_parameter(name, nn.Parameter(torch.empty(draw(shapes))))
        name = draw(st.sampled_from(["block", "layer"])) + str(number)
        parent.add_module(name, child)
        modules.append((f"{parent_fqn}.{name}".lstrip("."), child))
    units = draw(st.sets(st.sampled_from([fqn for fqn, _ in modules]), min_size=1))
    return model, units


@settings(
    max_examples=60,
    deadline=None,
    # The process group is the same for all examples, and none of them changes it.
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(plans())
def test_any_wrapping_is_read_right(plan):
    model, units = plan
    nbytes = {fqn: tensor.numel() * 4 for fqn, tensor in model.named_parameters()}
    shapes = {fqn: tuple(tensor.shape) for fqn, tensor in model.named_parameters()}
    # Longer names first: children before their parents.
    for fqn in sorted(units, key=len, reverse=True):
        fully_shard(model.get_submodule(fqn))

    def manager(fqn):
        above = [unit for unit in units if unit == "" or fqn.startswith(f"{unit}.")]
        return max(above, key=len, default=None)

    tree = capture_tree(model)
    expected = {unit: [] for unit in units}
    for fqn in nbytes:
        if manager(fqn) is not None:
            expected[manager(fqn)].append(fqn)
    assert {name: sorted(fqns) for name, fqns in tree.module_to_fqns.items()} == {
        name: sorted(fqns) for name, fqns in expected.items()
    }
    assert {fqn: entry.shape for fqn, entry in tree.named_parameters()} == shapes
    for index, unit in enumerate(tree.units):
        whole = sum(nbytes[fqn] for fqn in expected[tree.unit_name(index)])
        assert unit.nbytes_gathered - unit.nbytes_padding == whole
        assert unit.nbytes_kept * 4 == unit.nbytes_gathered
    assert parse_tree(format_tree(tree)) == tree_facts(tree)
    assert load_tree(dump_tree(tree)) == tree


def test_uneven_shards_are_padded_to_equal_size():
    tree = capture_tree(fully_shard(nn.Linear(10, 5)))
    # 5 rows on 4 ranks: 2 rows each, padded to 8 rows of 10, and 8 of the bias.
    (unit,) = tree.units
    assert unit.nbytes_gathered == 4 * (8 * 10 + 8)
    assert unit.nbytes_padding == 4 * (3 * 10 + 3)
    assert unit.nbytes_kept == 4 * (2 * 10 + 2)
    assert parameter(tree, "weight").local_numel == 20


def test_unit_precision_offload_and_prefetch_are_read():
    model = sharded(
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    model.layers[0].set_modules_to_forward_prefetch([model.layers[1]])
    model.layers[1].set_modules_to_backward_prefetch([model.layers[0]])
    if HAS_DIVIDE_FACTOR:
        model.layers[1].set_gradient_divide_factor(8)
        model.layers[1].set_force_sum_reduction_for_comms(enable=True)
    tree = capture_tree(model)
    first, second = unit_of(tree, "layers.0"), unit_of(tree, "layers.1")
    assert first.precision == Precision(param_dtype="bfloat16", reduce_dtype="float32")
    assert first.offload
    assert first.nbytes_gathered == 2 * (128 + 16 + 128 + 8)
    assert first.nbytes_kept == 128 + 16 + 128 + 8
    assert [tree.unit_name(i) for i in first.forward_prefetch] == ["layers.1"]
    assert [tree.unit_name(i) for i in second.backward_prefetch] == ["layers.0"]
    assert (
        "unit layers.0 fsdp2 shard=world reshard_after_forward=true param_dtype=bfloat16 "
        "reduce_dtype=float32 offload forward_prefetch=layers.1\n"
    ) in format_tree(tree)
    set_by_hand = (second.gradient_divide_factor, second.force_sum_reduction)
    assert set_by_hand == ((8.0, True) if HAS_DIVIDE_FACTOR else (None, False))
    assert (first.gradient_divide_factor, first.force_sum_reduction) == (None, False)


def test_modules_of_one_unit_keep_their_parameters():
    model = TokenModel()
    fully_shard([model.head, model.layers[1]])
    fully_shard(model)
    tree = capture_tree(model)
    assert unit_of(tree, "head+layers.1").nbytes_gathered == 4 * (128 + 128 + 16 + 128 + 8)
    assert tree.module_to_fqns["head"] == ("head.weight",)
    assert len(tree.module_to_fqns["layers.1"]) == 4
    assert "head[Linear] FULLY SHARDED" in str(tree)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")
def test_units_have_the_names_of_owners_in_recordings():
    model = TokenModel(layers=3)
    fully_shard([model.layers[2], model.layers[0]])
    fully_shard(model.layers[1])
    fully_shard(model)
    tree = capture_tree(model)
    with CommMode()(model) as recorder:
        model(torch.zeros(4, dtype=torch.long)).sum().backward()
    gathers = [entry for entry in recorder.recording.collectives if entry.kind == "all_gather"]
    names = {tree.unit_name(index): unit for index, unit in enumerate(tree.units)}
    assert {entry.owner for entry in gathers} == set(names) == {"", "layers.1", "layers.0+layers.2"}
    assert all(entry.nbytes == names[entry.owner].nbytes_gathered for entry in gathers)


@pytest.mark.parametrize("wrap", [lambda model: model, DistributedDataParallel])
def test_odd_names_match_in_recording_and_tree(wrap):
    model = nn.Module()
    odd = (".lead", "trail.", "a..b", "a b", "module")
    for name in odd:  # setattr() checks no name, unlike add_module()
        setattr(model, name, nn.Linear(2, 2))
    setattr(getattr(model, ".lead"), ".inner", nn.Linear(2, 2))
    model = wrap(model)
    tree = capture_tree(model)
    names = {tree.module_fqn(index) for index in range(len(tree.modules))}
    assert names == {"", *odd, ".lead..inner"}
    assert {*ModuleNames([model]).by_id.values()} == names


def test_a_root_without_parameters_is_still_the_root():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    tree = capture_tree(fully_shard(model))
    assert str(tree).startswith("[Sequential] FULLY SHARDED\n")
    root = unit_of(tree, "")
    assert (root.is_root, root.parameters, root.reshard_after_forward) == (True, (), None)
    assert unit_of(tree, "0").reshard_after_forward is True


def test_tied_parameters_are_one_with_two_names():
    tree = capture_tree(sharded(TokenModel(tied=True)))
    assert "head.weight" not in dict(tree.named_parameters())
    index = [fqn for fqn, _ in tree.named_parameters()].index("embed.weight")
    assert tree.tied_fqns(index) == ("head.weight",)
    assert tree.module_to_fqns[""] == ("embed.weight",)


def test_a_tie_that_two_units_broke_is_remembered():
    model = TokenModel(tied=True)
    fully_shard(model.embed)
    (group,) = groups_of_state(model.embed._get_fsdp_state())
    if not hasattr(group.fsdp_params[0], "_orig_param_uid"):
        pytest.skip("this torch forgets it")
    tree = capture_tree(sharded(model))
    split = parameter(tree, "head.weight").split_from
    assert tree.parameter_fqn(split) == "embed.weight"


def test_frozen_and_ignored_parameters_are_marked():
    model = TokenModel()
    model.embed.weight.requires_grad = False
    fully_shard(model, ignored_params={model.head.weight})
    tree = capture_tree(model)
    assert not parameter(tree, "embed.weight").trainable
    assert parameter(tree, "embed.weight").is_sharded
    assert parameter(tree, "head.weight").unit is None
    text = format_tree(tree)
    assert "parameter embed.weight float32[16,8] frozen world=Shard(0)\n" in text
    assert "parameter head.weight float32[16,8] unmanaged\n" in text


def test_meta_and_fake_tensors_have_the_same_snapshot():
    with torch.device("meta"):
        model = TokenModel()
    tree = capture_tree(sharded(model))
    assert {entry.device for entry in tree.parameters} == {"meta"}
    assert tree.notes == ("10 of 10 parameters are on the meta device and hold no data yet",)
    on_cpu = capture_tree(sharded())
    assert format_tree(tree) == format_tree(on_cpu)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        inside = capture_tree(model)
    assert format_tree(inside) == format_tree(on_cpu)


def test_dtype_change_after_sharding_is_captured():
    model = sharded()
    model.to(torch.bfloat16)
    assert parameter(capture_tree(model), "layers.0.up.weight").dtype == "bfloat16"


def test_construction_order_and_classes_are_ignored():
    class Renamed(TokenModel):
        pass

    model = Renamed(tied=True)
    for module in (model, *model.layers):
        module._modules = dict(reversed(module._modules.items()))
    assert format_tree(capture_tree(sharded(model))) == format_tree(
        capture_tree(sharded(TokenModel(tied=True)))
    )


def test_wrappers_leave_no_trace_in_the_snapshot():
    model = TokenModel()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1], backend="eager")
    tree = capture_tree(torch.compile(sharded(model), backend="eager"))
    assert format_tree(tree) == format_tree(capture_tree(sharded()))
    wrappers = {tree.module_fqn(i): node.wrappers for i, node in enumerate(tree.modules)}
    assert wrappers[""] == ("OptimizedModule",)
    assert wrappers["layers.0"] == ("CheckpointWrapper",)
    assert wrappers["layers.1"] == ("OptimizedModule",)


def test_a_module_at_two_places_is_listed_once():
    model = TokenModel()
    model.again = model.layers[0]
    tree = capture_tree(sharded(model))
    # As `named_modules` and recordings do, by the name that was registered first.
    assert "        layers.0[Block] FULLY SHARDED\n" in str(tree)
    assert "    again[Block] is layers.0" in str(tree).splitlines()
    assert len(tree.parameters) == 10
    assert {tree.unit_name(index) for index in range(3)} == {"", "layers.0", "layers.1"}


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_axes_of_a_destroyed_mesh_are_known(sizes):
    names = ("replicate", "shard")[-len(sizes) :]
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", sizes, mesh_dim_names=names))
    axes = capture_tree(model).mesh_axes
    dist.destroy_process_group()
    assert capture_tree(model).mesh_axes == axes
    assert [axis.name for axis in axes] == [*names]


def test_groups_are_looked_up_once_for_each_axis(monkeypatch):
    """With thousands of ranks, torch 2.7 needs seconds to find a group."""
    looked_up = []
    ranks_along = units._ranks_along
    monkeypatch.setattr(
        units, "_ranks_along", lambda mesh, dim: looked_up.append(dim) or ranks_along(mesh, dim)
    )
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tree = capture_tree(sharded(mesh=mesh["dp"]))
    assert len([*tree.named_parameters()]) > 2
    assert looked_up == [0]
