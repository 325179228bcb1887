"""What a recording, a simulation or a tree does in a torch without one of its private names.

Each case removes one name in a fork (see `without_names.py`). Either an UpstreamChangedError names
it, or the results are the same as with the name, or torch itself fails, because it needs the name.
"""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from torch_facts import VERSION

pytestmark = pytest.mark.upstream

TESTS = Path(__file__).parents[1]
UNIT = "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup"
STATE = "torch.distributed.fsdp._fully_shard._fsdp_state.FSDPState"
FSDP1 = "torch.distributed.fsdp._runtime_utils"
HANDLE = "torch.distributed.fsdp._flat_param.FlatParamHandle"
C10D = "torch.distributed.distributed_c10d"
FAKE = "torch._subclasses.fake_tensor"
PROPAGATION = "torch.distributed.tensor._sharding_prop"

# For each step and outcome: a module, class or object, and the names that are removed from it.
NAMES = {
    ("record", "error"): (
        "torch.nn.Module _call_impl",
        "torch.optim.Optimizer profile_hook_step",
        "torch.autograd.graph _engine_run_backward",
        "torch.autograd _engine_run_backward _get_sequence_nr",
        "torch._C _current_autograd_node _current_graph_task_id _has_storage Future",
        "torch._C _is_key_in_tls _get_obj_in_tls _stash_obj_in_tls",
        "torch._C._dynamo.eval_frame set_eval_frame",
        "torch._dynamo.trace_rules add",
        "torch._dynamo.callback callback_handler",
        "torch._ops OpOverload",
        f"{FAKE} FakeTensor",
        "torch._subclasses.functional_tensor FunctionalTensor",
        "torch.utils._python_dispatch TorchDispatchMode",
        "torch.UntypedStorage _cdata",
        "torch.distributed.tensor._redistribute Redistribute redistribute_local_tensor",
        "torch.distributed.fsdp.FSDPModule _get_fsdp_state",
        "torch.distributed.fsdp._fully_shard._fsdp_common TrainingState",
        "torch.distributed.fsdp._common_utils HandleTrainingState",
        f"{STATE} _pre_forward _post_forward _pre_backward",
        f"{UNIT.rpartition('.')[0]} FSDPParamGroup",
        f"{UNIT} pre_forward unshard wait_for_unshard reshard pre_backward post_backward",
        f"{UNIT} _to_sharded _to_sharded_post_forward finalize_backward",
        f"{UNIT} is_unsharded is_sharded_post_forward",
        "unit _training_state _all_gather_result mesh_info fsdp_params modules",
        "param _orig_size",
        "state _fsdp_param_groups",
        f"{FSDP1} _reduce_grad _reduce_grad_no_shard _unshard _prefetch_handle",
        f"{HANDLE.rpartition('.')[0]} FlatParamHandle",
        f"{HANDLE} _all_gather_flat_param unshard_grad reshard",
        "wrapper _handle",
        "handle _fully_sharded_module flat_param",
        "flat_param _numels",
    ),
    ("record", "same"): (
        "torch._C _dispatch_library _dispatch_get_all_op_names _dispatch_dump",
        "torch._C _dispatch_keyset_full_after",
        "torch._C._distributed_c10d _dump_fr_trace _dump_nccl_trace",
        "torch.library _impls",
        # Only torch.compile needs these.
        "torch _guards",
        "torch.fx._lazy_graph_module _LazyGraphModule",
    ),
    ("record", "torch fails"): (
        "torch._C _dispatch_tls_is_dispatch_key_included",
        "torch.library _defs",
        "torch.Tensor _version",
        "gather _schema",
        f"{C10D} _resolve_process_group _world",
        f"{STATE.rpartition('.')[0]} FSDPState",
        "state _state_ctx _modules _is_root",
        "unit _sharded_state",
        "param _module_info sharded_param",
        f"{HANDLE} needs_unshard",
        "handle _training_state",
    ),
    ("simulate", "error"): (
        f"{FAKE} FakeTensor FakeTensorMode unset_fake_temporarily UnsupportedOperatorException",
        f"{FAKE} DataDependentOutputException DynamicOutputShapeException",
        f"{FAKE}.FakeTensor device",
        "torch._library.custom_ops OPDEFS",
        "torch._ops OpOverload",
        "torch._ops.OpOverload _opname",
        "add _schema",
        "torch.utils._device _device_constructors",
        "torch._C _get_default_device _dispatch_has_kernel",
        "torch._C._nn _parse_to",
        "torch._C._distributed_c10d FakeWork",
        "torch.distributed.fsdp._fully_shard._fsdp_init _move_states_to_device",
        "torch.distributed.fsdp._flat_param FlatParamHandle",
        "torch.distributed.fsdp._init_utils _check_module_states_for_sync_module_states",
        "torch.distributed _verify_params_across_processes _compute_bucket_assignment_by_size",
        "torch.nn.parallel.DistributedDataParallel _find_common_rank",
        "torch.autograd.Variable _execution_engine",
        f"{PROPAGATION} ShardingPropagator",
        "torch.distributed.tensor.placement_types _StridedShard",
        f"{C10D} _object_to_tensor _tensor_to_object _new_process_group_helper",
        "torch.jit._state _enabled",
        "torch.nn.attention.flex_attention flex_attention_hop",
        "torch.distributed._functional_collectives _maybe_wrap_tensor",
    ),
    ("simulate", "same"): (
        "torch.distributed.tensor._random _rng_tracker",
        "torch._meta_registrations _meta_grouped_mm_common _create_grouped_mm_output_tensor",
        "torch._C _get_nested_int",
        "torch.nn.attention.flex_attention _validate_device",
        "torch.nn.attention.flex_attention _FLEX_ATTENTION_DISABLE_COMPILE_DEBUG",
        f"{C10D} _get_default_timeout",
        "torch.distributed._meta_registrations generate_unique_id",
        "torch.distributed.ProcessGroup _allgather_base _reduce_scatter_base",
        "torch.distributed.device_mesh.DeviceMesh _concatenate",
        "torch.optim.optimizer _get_capturable_supported_devices",
    ),
    ("simulate", "torch fails"): (
        "torch.utils._pytree tree_map_only",
        f"{FAKE} _set_cache_key",
        "torch.Tensor _has_symbolic_sizes_strides",
        "torch.distributed.fsdp._fully_shard._fsdp_param _chunk_with_empty",
        f"{PROPAGATION} _propagate_use_strided_shard_flag",
        f"{PROPAGATION}.ShardingPropagator _propagate_tensor_meta_non_cached",
        f"{C10D} _world",
    ),
    ("capture", "error"): (
        "torch.distributed.tensor.placement_types _StridedShard",
        "torch.distributed.tensor.DTensor _local_tensor",
        "torch.distributed.fsdp.FSDPModule _get_fsdp_state",
        "state _modules _is_root _states_to_forward_prefetch _states_to_backward_prefetch",
        "state _fsdp_param_groups",
        "unit fsdp_params mesh_info post_forward_mesh_info offload_policy unshard_in_backward",
        "unit gradient_divide_factor force_sum_reduction_for_comms",
        "param _module_info sharded_param sharded_state _orig_size padded_sharded_param_size",
        "wrapper _handle _is_root process_group",
        "handle flat_param _fwd_bwd_param_dtype _orig_param_dtype",
        "flat_param _param_infos _shared_param_infos _shapes _numels _shard_param_infos",
        "flat_param _sharded_size _params",
    ),
    ("capture", "same"): (
        "state _auto_reshard_after_forward",
        "unit mp_policy",
        "param _orig_param_uid",
    ),
    ("capture", "torch fails"): ("torch.distributed._composable.replicate DDP",),
}


# Outcomes that differ in torch before 2.11 (checked in 2.7.1).
EARLIER_OUTCOMES = {
    # Before a version: other outcomes. Functional collectives do not see whether they are traced.
    "torch._C _dispatch_tls_is_dispatch_key_included": ((2, 9), "same"),
    # `fully_shard` has its own reference to the function.
    "torch.distributed.fsdp._fully_shard._fsdp_init _move_states_to_device": ((2, 11), "same"),
    # FSDP2 calls these methods; checked in 2.11.0, and not in 2.12.
    "torch.distributed.ProcessGroup _allgather_base": ((2, 13), "torch fails"),
    "torch.distributed.ProcessGroup _reduce_scatter_base": ((2, 13), "torch fails"),
}

# Private attributes that the rooms read, but that no case above can remove.
NOT_REMOVED = {
    *("_exit", "_getframe", "_replace"),  # of Python
    *("_modules", "_parameters"),  # of nn.Module, which torch itself reads first
    "_sequence_nr",  # of an autograd node, a class written in C++
    # Of objects that a step creates; the first two may be missing.
    *("_unsharded_param", "_inter_node_pg", "_device_type", "_init_fn", "_init_kwargs"),
    "_DispatchCacheKey",  # only read in torch 2.7
    "_module_classes_to_ignore",  # documented
    # Operations, which torch.ops loads again.
    *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention"),
    *("_amp_foreach_non_finite_check_and_unscale_", "_ctc_loss", "_pack_padded_sequence"),
    *("_dtensor", "_local_scalar_dense", "_to_copy"),
}
OURS = {"self", "cls", "super()", "UnitWatch"}


def private_attributes():
    """Yield the file and name of each private attribute that a room reads from another object."""
    for room in ("recording", "sharding", "simulation"):
        for path in (TESTS.parent / "pytest_fsdp_comm" / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
                    is_private = "._" in node.module
                    names = [alias.name for alias in node.names]
                    yield from ((path, name) for name in names if is_private or name[0] == "_")
                elif isinstance(node, ast.Attribute) and node.attr[0] == "_" != node.attr[1]:
                    yield from [(path, node.attr)] * (ast.unparse(node.value) not in OURS)


def test_each_private_attribute_has_a_case():
    cases = {name for rows in NAMES.values() for row in rows for name in row.split()}
    modules = {part for case in cases for part in case.split(".")}
    read = [(path.name, name) for path, name in private_attributes()]
    assert len(read) > 100
    assert [pair for pair in read if pair[1] not in {*cases, *modules, *NOT_REMOVED}] == []


@pytest.fixture(scope="module")
def outcome_of():
    """Return the outcome of a step without a name; ``""`` for the step with all names."""
    command = [sys.executable, "without_names.py"]
    with subprocess.Popen(
        command, cwd=TESTS, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    ) as process:

        def ask(step, name=""):
            process.stdin.write(f"{step} {name}\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        complete = {step: ask(step) for step in ("record", "simulate", "capture")}
        yield lambda step, name: ask(step, name) if name else complete[step]
        process.stdin.close()


@pytest.mark.parametrize(
    ("step", "expected", "name"),
    [
        pytest.param(
            *key,
            f"{place} {name}",
            id=f"{key[0]}-{place}.{name}",
            # The matrix runs all of them with each version of torch. Only the errors depend on this
            # project's code as much as on torch.
            marks=[pytest.mark.release] * (number % 3 > 0 or key[1] != "error"),
        )
        for key, rows in NAMES.items()
        for place, *names in map(str.split, rows)
        for number, name in enumerate(names)
    ],
)
def test_removed_name_has_its_outcome(outcome_of, step, expected, name):
    outcome, complete = outcome_of(step, name.replace(" ", ".")), outcome_of(step, "")
    assert "Error" not in complete
    before, earlier = EARLIER_OUTCOMES.get(name, ((0, 0), ""))
    if before > VERSION:
        expected = earlier
    if outcome == "absent":
        pytest.skip("this torch does not have the name")
    if expected == "same":
        assert outcome == complete
    elif expected == "error":
        assert outcome.startswith("package: UpstreamChangedError: torch ")
        assert name.rpartition(" ")[2] in outcome
        assert "pytest-fsdp-comm was written for torch 2.7 to 2.15: use one of these" in outcome
    else:
        assert outcome.startswith("torch: ")
