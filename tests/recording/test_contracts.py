"""The private names of torch that the recorder relies on: fails when one moves."""

import threading
from importlib import metadata
from types import SimpleNamespace

import pytest
import torch
from models import WIDTH, Model, shard, step
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils import _python_dispatch

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS
from pytest_fsdp_comm.errors import UpstreamChangedError
from pytest_fsdp_comm.recording import kernels, operations, patches
from pytest_fsdp_comm.recording.mesh_axes import find_axes, process_groups
from pytest_fsdp_comm.recording.operations import BATCH, SILENT, VALUE_READS, find_operation
from pytest_fsdp_comm.recording.owners import fsdp, stack, tensors
from pytest_fsdp_comm.recording.patches import patch_attributes
from pytest_fsdp_comm.recording.script import watch_optimizer_steps
from pytest_fsdp_comm.recording.steps import keep_existing_group

pytestmark = pytest.mark.upstream


def test_torch_has_names_of_stack_walk():
    assert nn.Module._call_impl.__code__.co_name == "_call_impl"
    assert stack.engine_code().co_name == "_engine_run_backward"
    assert sorted(code.co_name for code in stack._clipping_codes()) == [
        "_clip_grads_with_norm_",
        "_get_total_norm",
        "clip_grad_norm_",
        "clip_grad_norm_",  # of FSDP1
    ]
    assert stack._registered_forward_code().co_varnames[0] == "self"
    # torch.compile passes this class to the backends that interpret a graph.
    assert issubclass(stack.graph_type(), torch.fx.GraphModule)
    # A graph traced by a user is the user's module.
    assert not stack.is_compiled_graph(torch.fx.symbolic_trace(torch.nn.Linear(2, 2)))
    # torch wraps a class's step when its first instance is made.
    torch.optim.SGD([nn.Parameter(torch.ones(1))])
    assert torch.optim.SGD.step.__code__ is stack._STEP


def test_autograd_has_the_private_names_that_are_read():
    assert torch._C._current_graph_task_id() == -1
    assert torch._C._current_autograd_node() is None
    before = torch.autograd._get_sequence_nr()
    made = torch.ones(1, requires_grad=True) * 2
    assert made.grad_fn._sequence_nr() >= before
    assert torch.autograd._get_sequence_nr() > made.grad_fn._sequence_nr()


def test_graph_task_id_and_optimizer_hooks_in_backward():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    within, stepped = [], []
    parameter.register_post_accumulate_grad_hook(
        lambda _: within.append(torch._C._current_graph_task_id())
    )
    with watch_optimizer_steps(stepped.append):
        (parameter * 2).backward()
        optimizer.step()
    optimizer.step()
    assert within != [-1]
    assert stepped == [optimizer]


def test_scaler_step_skips_infinite_gradients():
    parameter = nn.Parameter(torch.ones(1))
    optimizer, scaler = torch.optim.SGD([parameter]), torch.amp.GradScaler("cpu")
    called, stepped = [], []
    step = vars(torch.amp.GradScaler)["step"]

    def around(own, given, *args, **kwargs):
        called.append(given)
        return step(own, given, *args, **kwargs)

    with (
        patch_attributes((torch.amp.GradScaler, "step", around)),
        watch_optimizer_steps(stepped.append),
    ):
        for factor in (1.0, torch.inf):
            scaler.scale((parameter * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert called == [optimizer, optimizer]
    assert stepped == [optimizer]
    assert vars(torch.amp.GradScaler)["step"] is step


def test_torch_has_both_names_of_init_and_destroy():
    for name in ("init_process_group", "destroy_process_group"):
        of_package = getattr(torch.distributed, name)
        assert of_package is getattr(torch.distributed.distributed_c10d, name)
    with keep_existing_group():
        torch.distributed.init_process_group("no backend")
        torch.distributed.distributed_c10d.destroy_process_group()
    assert not torch.distributed.is_initialized()


def test_weak_storage_reference_keeps_address():
    tensor = torch.ones(4)
    reference = tensors.make_storage_ref(tensor)
    assert reference.cdata == tensor.view(2, 2).untyped_storage()._cdata
    assert tensors.extent_of(tensor[1:3])[1:] == (4, 12)
    # A dimension of size 1 may have any stride.
    assert tensors.extent_of(torch.empty_strided((2, 1, 3), (3, 0, 2)))[1:] == (0, 32)
    assert tensors.extent_of(torch.ones(1).expand(2)) is None
    assert not reference.expired()
    del tensor
    assert reference.expired()


def test_redistribution_frame_has_its_tensor():
    code = stack.code_of("torch.distributed.tensor._redistribute", "Redistribute.forward")
    assert code.co_varnames[:2] == ("ctx", "input")


def test_nodes_passing_gradients_on_have_known_names():
    parameter = nn.Parameter(torch.ones(2, 2))
    made = parameter.to(torch.bfloat16).clone().view(4, 1).t().transpose(0, 1)
    assert tensors._find_label_behind_node(made.grad_fn, None).parameter is parameter
    assert tensors._find_label_behind_node((parameter * 2).grad_fn, None) is None


def test_dispatch_modes_can_be_hidden_from():
    def active():
        return _python_dispatch._get_current_dispatch_mode_stack()

    with _python_dispatch.TorchDispatchMode() as mode:
        with _python_dispatch._disable_current_modes():
            assert active() == []
        assert active() == [mode]


def test_a_redistribution_has_the_locals_that_are_read():
    code = stack.code_of("torch.distributed.tensor._redistribute", "redistribute_local_tensor")
    assert {"current_spec", "target_spec", "local_tensor"} <= set(code.co_varnames)


def test_attributes_of_torch_are_restored_after_block():
    def attributes():
        return {
            (holder.__name__, name): vars(holder).get(name)
            for holder, name, _ in patches._torch_patches()
            if name != "clear"
        }

    originals = attributes()
    with patches.watch_torch():
        inside = attributes()
        with patches.watch_torch():
            pass
        assert attributes() == inside
    assert attributes() == originals
    assert not any(inside[place] is originals[place] for place in inside)
    units = {name for holder, name in inside if holder == "FSDPParamGroup"}
    assert units == {
        *("pre_forward", "unshard", "wait_for_unshard", "reshard", "pre_backward", "post_backward"),
        *("_to_sharded", "_to_sharded_post_forward", "finalize_backward"),
    }


@pytest.mark.distributed(world_size=2, backend="fake")
def test_units_show_what_they_do_and_what_they_hold(device_mesh):
    model = shard(Model(), device_mesh())
    seen = []

    def look(group):
        seen.append((group._training_state, group.is_unsharded, group.is_sharded_post_forward))

    ((_, group),) = fsdp.param_groups([model.layers[0]])
    model.layers[0].up.register_forward_hook(lambda *_: look(group))
    model.layers[0].up.register_full_backward_hook(lambda *_: look(group))
    step(model)
    states = fsdp._look_up_training_states(fsdp._FSDP2_STATES)
    assert seen == [(state, True, False) for state in states]
    assert group._all_gather_result is None
    group.unshard()
    dtypes = group._all_gather_result.param_all_gather_input_dtypes
    assert dtypes == [[torch.float32], [torch.float32]]

    wrapper = FullyShardedDataParallel(Model(), device_id=torch.device("cpu"))
    (handle,) = fsdp._list_fsdp1_handles([wrapper, wrapper.head])
    seen.clear()
    wrapper.head.register_forward_hook(lambda *_: seen.append(handle._training_state))
    wrapper.head.register_full_backward_hook(lambda *_: seen.append(handle._training_state))
    step(wrapper)
    assert seen == fsdp._look_up_training_states(fsdp._FSDP1_STATES)
    assert sum(handle.flat_param._numels) == 6 * WIDTH * WIDTH
    assert handle.flat_param._full_param_padded.untyped_storage().size() == 0


def test_a_state_that_moved_is_named():
    enum = "torch.distributed.fsdp._common_utils.HandleTrainingState"
    with pytest.raises(UpstreamChangedError, match=f"no longer has {enum}.NONSENSE, which the"):
        fsdp._look_up_training_states(f"{enum} FORWARD NONSENSE")


@pytest.mark.distributed(world_size=2, backend="fake")
def test_the_root_of_a_unit(device_mesh, monkeypatch):
    model = shard(Model(), device_mesh())
    # Each state is alone until the root runs.
    assert fsdp.fsdp_root(model.layers[0]) is None
    model(torch.ones(1, WIDTH))
    assert fsdp.fsdp_root(model.layers[0]) is model
    assert fsdp.fsdp_root(model) is model
    assert fsdp.fsdp_root(model.embed) is None
    state = model.layers[0]._get_fsdp_state()
    monkeypatch.setattr(state, "_state_ctx", SimpleNamespace())
    with pytest.raises(UpstreamChangedError, match="changed a private name of FSDPState"):
        fsdp.fsdp_root(model.layers[0])


def test_a_method_that_moved_is_named(monkeypatch):
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    original = FSDPParamGroup.unshard
    monkeypatch.delattr(FSDPParamGroup, "reshard")
    with pytest.raises(UpstreamChangedError) as caught, patches.watch_torch():
        pass
    assert f"torch {metadata.version('torch')} no longer has " in str(caught.value)
    assert "FSDPParamGroup.reshard, which" in str(caught.value)
    # Methods wrapped before the missing one are restored.
    assert FSDPParamGroup.unshard is original


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (nn.utils, "get_total_norm"),
        (nn.utils, "clip_grads_with_norm_"),
        (nn.utils, "clip_grad_norm_"),
        (FullyShardedDataParallel, "clip_grad_norm_"),
    ],
)
def test_a_clipping_function_that_moved_is_named(monkeypatch, owner, name):
    stack._clipping_codes.cache_clear()
    stack.code_of.cache_clear()
    monkeypatch.delattr(owner, name)
    with pytest.raises(UpstreamChangedError, match=rf"longer has \S*{owner.__name__}\.{name},"):
        stack._clipping_codes()


@pytest.mark.distributed(world_size=2, backend="fake")
def test_only_groups_of_this_rank_are_listed(monkeypatch):
    distributed = torch.distributed
    mine = distributed.new_group([0])
    distributed.new_group([1])
    world = distributed.distributed_c10d._get_default_group()
    assert set(process_groups()) == {mine, world}
    assert dict(find_axes())["world"] == world.group_name
    moved = SimpleNamespace(default_pg=world)
    monkeypatch.setattr(distributed.distributed_c10d, "_world", moved)
    with pytest.raises(UpstreamChangedError, match=r"longer has torch\.distributed\.\w+\._world"):
        process_groups()


def test_without_process_group_no_groups_or_axes():
    assert process_groups() == []
    assert list(find_axes()) == []


def test_a_function_that_moved_is_named():
    with pytest.raises(UpstreamChangedError, match=r"no longer has torch\.nn\.nonsense,"):
        stack.code_of("torch.nn", "nonsense")


def communicating_operations():
    namespaces = ("c10d", "_c10d_functional", "_dtensor")
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace in namespaces and name not in SILENT:
            yield getattr(getattr(torch.ops, namespace), name), schema


def test_every_operation_of_this_torch_is_in_the_table():
    found = list(communicating_operations())
    assert len(found) > 30
    for packet, schema in found:
        operation = find_operation(packet.default)
        assert operation.kind in {*COLLECTIVE_KINDS, BATCH}
        names = {argument.name for argument in schema.arguments} | {"", *operations.Location}
        assert {operation.sent, operation.received, operation.root, operation.peer} <= names, schema


def test_other_operations_are_none_of_ours():
    assert find_operation(torch.ops.aten.add.Tensor) is None
    assert find_operation(torch.ops._c10d_functional.wait_tensor.default) is None


def test_an_unsharded_module_has_no_unit_of_its_own():
    assert [*fsdp.param_groups([nn.Linear(1, 1)])] == []


def test_value_reads_match_tags_of_torch():
    found, sparse = set(), set()
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, short = name.partition("::")
        of = torch._C._dispatch_has_kernel_for_dispatch_key
        if namespace != "aten" or short.endswith("out") or of(name, "CompositeImplicitAutograd"):
            continue
        tags = {*kernels._look_up_overload(name).tags}
        reads = tags & {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
        if reads:
            found.add(name)
        elif short.startswith("_to_sparse"):
            sparse.add(short)
    # These return no values to Python, and their shapes do not depend on values.
    found -= {"aten::linalg_lstsq", "aten::_ctc_loss", "aten::_ctc_loss.Tensor"}
    assert found - {*VALUE_READS} == set()
    # Of which torch 2.7 does not say so.
    assert {*VALUE_READS} - found <= {"aten::_unique"}
    # Of which test_value_dependence.py shows which of these they call, but for the last, whose
    # results have the shape that the dense tensor gives them.
    layouts = ("", ".sparse_dim", "_csr", "_csc", "_bsr", "_bsc", "_semi_structured")
    assert sparse == {f"_to_sparse{layout}" for layout in layouts}


def test_kernel_key_is_free_and_below_subclasses():
    key = torch._C.DispatchKey.BackendSelect
    after = torch._C._dispatch_keyset_full_after(key)
    assert kernels.register_collective_kernels() == ""
    assert not after.has(key)
    assert not after.has(torch._C.DispatchKey.Python)
    assert after.has(torch._C.DispatchKey.CPU)
    included = []
    thread = threading.Thread(
        target=lambda: included.append(torch._C._dispatch_tls_is_dispatch_key_included(key))
    )
    thread.start()
    thread.join()
    assert included == [True]


def test_torch_that_lacks_what_kernels_need_is_named(monkeypatch):
    monkeypatch.delattr(torch._C, "_dispatch_library")
    assert kernels.register_collective_kernels() == "this torch has no torch._C._dispatch_library"
