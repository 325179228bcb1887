"""FSDP2 in all its settings: collectives counted by hand, and by profiler and flight recorder."""

import pytest
import torch
from models import BLOCK_NBYTES, LINEAR_NBYTES, ROOT_NBYTES, WIDTH, Model, shard, step
from oracle import gloo_and_fake, lines, witnessed, witnessed_twice
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch_facts import needs_replicas_of_fsdp2

BLOCK, ROOT = BLOCK_NBYTES, ROOT_NBYTES

FORWARD = [
    f"forward . all_gather[dp] {ROOT} < .",
    f"forward layers.0 all_gather[dp] {BLOCK} < layers.0",
    f"forward layers.1 all_gather[dp] {BLOCK} < layers.1",
]
# Each pre-backward hook prefetches the unit before; the root's, the last block.
BACKWARD_GATHERS = [
    f"backward layers.1 all_gather[dp] {BLOCK} < .",
    f"backward layers.0 all_gather[dp] {BLOCK} < layers.1",
]
REDUCES = [
    f"backward layers.1 reduce_scatter[dp] {BLOCK} < layers.1",
    f"backward layers.0 reduce_scatter[dp] {BLOCK} < layers.0",
    f"backward . reduce_scatter[dp] {ROOT} < .",
]
STEP = [*FORWARD, *BACKWARD_GATHERS, *REDUCES]


def reshards(comm_mode):
    return [f"{e.phase.value} {e.action} {e.module or '.'}" for e in comm_mode.reshards]


@pytest.mark.upstream
@gloo_and_fake(2)
def test_backward_prefetch_issues_in_prefetching_unit(comm_mode, device_mesh):
    model = shard(Model(blocks=3), device_mesh())
    model.layers[2].set_modules_to_backward_prefetch([model.layers[1], model.layers[0]])
    witnessed(comm_mode, model, lambda: step(model))
    assert [line for line in lines(comm_mode) if line.startswith("backward")] == [
        f"backward layers.2 all_gather[dp] {BLOCK} < .",
        f"backward layers.1 all_gather[dp] {BLOCK} < layers.2",
        f"backward layers.0 all_gather[dp] {BLOCK} < layers.2",
        f"backward layers.2 reduce_scatter[dp] {BLOCK} < layers.2",
        f"backward layers.1 reduce_scatter[dp] {BLOCK} < layers.1",
        f"backward layers.0 reduce_scatter[dp] {BLOCK} < layers.0",
        f"backward . reduce_scatter[dp] {ROOT} < .",
    ]


@gloo_and_fake(4)
def test_a_smaller_group_gathers_again_in_backward(comm_mode, device_mesh):
    model = shard(Model(), device_mesh(), reshard_after_forward=2)
    witnessed(comm_mode, model, lambda: step(model))
    assert lines(comm_mode) == [
        *FORWARD,
        # From the two ranks that hold the parameters after forward.
        f"backward layers.1 all_gather[dp.post_forward] {BLOCK} < .",
        f"backward layers.0 all_gather[dp.post_forward] {BLOCK} < layers.1",
        *REDUCES,
    ]
    sizes = {axis.name: axis.size for axis in comm_mode.recording.mesh_axes}
    assert sizes == {"dp": 4, "dp.post_forward": 2}


@gloo_and_fake(2)
@pytest.mark.parametrize(
    ("root", "backward_gathers"),
    [
        (True, [f"backward . all_gather[dp] {ROOT} < .", *BACKWARD_GATHERS]),
        (None, BACKWARD_GATHERS),
    ],
)
def test_a_resharded_root_is_gathered_in_backward(comm_mode, device_mesh, root, backward_gathers):
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh(), reshard_after_forward=None)
    fully_shard(model, mesh=device_mesh(), reshard_after_forward=root)
    witnessed(comm_mode, model, lambda: step(model))
    assert lines(comm_mode) == [*FORWARD, *backward_gathers, *REDUCES]


@gloo_and_fake(2)
def test_units_left_gathered_after_backward_are_noted(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    model.set_reshard_after_backward(False)
    # The second run finds all units unsharded, so that the profiler sees another step.
    witnessed(comm_mode, model, lambda: step(model), profiler=False)
    assert lines(comm_mode) == STEP
    assert not [line for line in reshards(comm_mode) if line.startswith("backward reshard")]
    with comm_mode(model):
        step(model)
    assert lines(comm_mode) == [*BACKWARD_GATHERS, *REDUCES]
    assert comm_mode.recording.notes == (
        "the first all-gather is missing for units that were already unsharded when the recording "
        "began, e.g. after a forward without a backward, or with "
        "set_reshard_after_backward(False); reshard() before the block would undo that: "
        "(root), layers.0, layers.1",
    )


@pytest.mark.upstream
@needs_replicas_of_fsdp2
@gloo_and_fake(4)
def test_replicas_reduced_only_in_last_micro_batch(comm_mode, device_mesh):
    model = shard(Model(), device_mesh(replicate=2, shard=2))

    def two_micro_batches():
        for is_last in (False, True):
            model.set_requires_all_reduce(is_last)
            step(model)

    witnessed(comm_mode, model, two_micro_batches)
    assert comm_mode.counts("reduce_scatter", axis="shard") == 2 * 3
    assert [line for line in lines(comm_mode) if "all_reduce" in line] == [
        f"backward layers.1 all_reduce[replicate] {BLOCK // 2} < layers.1",
        f"backward layers.0 all_reduce[replicate] {BLOCK // 2} < layers.0",
        f"backward . all_reduce[replicate] {ROOT // 2} < .",
    ]


@gloo_and_fake(2)
def test_manually_unsharded_unit_skips_forward_gather(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())

    def by_hand():
        model.layers[0].unshard(async_op=True).wait()
        step(model)
        model.unshard()
        model.reshard()

    witnessed(comm_mode, model, by_hand)
    assert lines(comm_mode) == [
        f"outside layers.0 all_gather[dp] {BLOCK} < -",
        *(line for line in STEP if not line.startswith("forward layers.0")),
        f"outside . all_gather[dp] {ROOT} < -",
    ]
    assert [line for line in reshards(comm_mode) if line.startswith("outside")] == [
        "outside unshard layers.0",
        "outside unshard .",
        "outside reshard .",
    ]


@gloo_and_fake(2)
def test_ignored_parameters_are_not_sent(comm_mode, device_mesh):
    model = Model()
    ignored = {layer.up.weight for layer in model.layers}
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh(), ignored_params=ignored)
    fully_shard(model, mesh=device_mesh(), ignored_params=ignored)
    witnessed(comm_mode, model, lambda: step(model))
    expected = [
        line.replace(f" {BLOCK} ", f" {LINEAR_NBYTES} ") for line in STEP if "layers" in line
    ]
    assert [line for line in lines(comm_mode) if "layers" in line] == expected


@gloo_and_fake(2)
def test_tied_parameters_are_sent_once(comm_mode, device_mesh):
    model = Model()
    model.head.weight = model.embed.weight
    shard(model, device_mesh())
    witnessed(comm_mode, model, lambda: step(model))
    assert comm_mode.nbytes(owner="") == 2 * LINEAR_NBYTES  # a gather and a reduce of one matrix
    assert len(comm_mode.events) == len(STEP)


@gloo_and_fake(2)
def test_only_adapters_in_frozen_model_are_reduced(comm_mode, device_mesh):
    # As LoRA does: the adapters are trainable units inside of frozen ones.
    class Adapted(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(requires_grad=False)
            self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

        def forward(self, x):
            return self.base(x) + self.adapter(x)

    model = nn.Sequential(Adapted(), Adapted())
    for part in model:
        fully_shard(part.adapter, mesh=device_mesh())
        fully_shard(part, mesh=device_mesh())
    fully_shard(model, mesh=device_mesh())

    def two_micro_batches():
        for is_last in (False, True):
            model.set_requires_gradient_sync(is_last)
            step(model)

    witnessed(comm_mode, model, two_micro_batches)
    # The frozen matrices are gathered again for each micro-batch, and never reduced.
    assert comm_mode.counts("all_gather", owner="0", phase="forward") == 2
    assert {e.owner for e in comm_mode.events if e.kind == "reduce_scatter"} == {
        "0.adapter",
        "1.adapter",
    }
    assert comm_mode.counts("reduce_scatter") == 2


@pytest.mark.upstream
@gloo_and_fake(2)
def test_mixed_precision_uses_its_dtypes(comm_mode, device_mesh):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh(), mp_policy=policy)
    fully_shard(model, mesh=device_mesh(), mp_policy=policy)
    witnessed(comm_mode, model, lambda: step(model))
    sent = {(event.kind, event.dtype, event.nbytes) for event in comm_mode.events}
    assert sent == {("all_gather", "bfloat16", BLOCK // 2), ("reduce_scatter", "float32", BLOCK)}


@gloo_and_fake(2)
def test_gather_of_several_dtypes_lists_dtypes(comm_mode, device_mesh):
    model = nn.Sequential(Model().layers[0])
    model[0].down = model[0].down.bfloat16()
    # FSDP2 takes trainable parameters of one element type only.
    model[0].down.weight.requires_grad = False
    model[0].down.register_forward_pre_hook(lambda _, args: args[0].bfloat16())
    fully_shard(model, mesh=device_mesh())
    witnessed_twice(comm_mode, model, lambda: step(model))
    gather, reduction = comm_mode.events
    assert (gather.dtype, gather.nbytes) == ("float32+bfloat16", LINEAR_NBYTES * 3 // 2)
    assert (reduction.dtype, reduction.nbytes) == ("float32", LINEAR_NBYTES)
    assert comm_mode.peak_gathered_nbytes == LINEAR_NBYTES * 3 // 2


@pytest.mark.skipif(
    not hasattr(MixedPrecisionPolicy, "param_dtype_override_fn"), reason="new in torch 2.15"
)
@gloo_and_fake(2)
def test_excepted_parameters_gather_in_original_dtype(comm_mode, device_mesh, fsdp_tree):
    model = nn.Sequential(Model().layers[0])
    excepted = model[0].down.weight
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        param_dtype_override_fn=lambda own: own.dtype if own is excepted else None,
    )
    model[0].down.register_forward_pre_hook(lambda _, args: args[0].float())
    fully_shard(model, mesh=device_mesh(), mp_policy=policy)
    witnessed_twice(comm_mode, model, lambda: step(model))
    gather = comm_mode.events[0]
    assert (gather.dtype, gather.nbytes) == ("bfloat16+float32", LINEAR_NBYTES * 3 // 2)
    assert comm_mode.peak_gathered_nbytes == LINEAR_NBYTES * 3 // 2
    (unit,) = fsdp_tree(model).units
    assert unit.precision.param_dtype == "bfloat16+float32"
    assert unit.nbytes_gathered == LINEAR_NBYTES * 3 // 2


@gloo_and_fake(2)
def test_offloading_to_the_host_sends_the_same(comm_mode, device_mesh):
    policy = CPUOffloadPolicy(pin_memory=False)
    model = Model()
    for layer in model.layers:
        fully_shard(layer, mesh=device_mesh(), offload_policy=policy)
    fully_shard(model, mesh=device_mesh(), offload_policy=policy)
    witnessed(comm_mode, model, lambda: step(model))
    assert lines(comm_mode) == STEP


@gloo_and_fake(2)
def test_a_module_shared_by_two_places_is_reduced_once(comm_mode, device_mesh):
    model = Model()
    model.layers[1] = model.layers[0]
    fully_shard(model.layers[0], mesh=device_mesh())
    fully_shard(model, mesh=device_mesh())
    witnessed(comm_mode, model, lambda: step(model))
    assert {event.owner for event in comm_mode.events} == {"", "layers.0"}
    assert comm_mode.counts("all_gather", owner="layers.0", phase="forward") == 2
    assert comm_mode.counts("reduce_scatter", owner="layers.0") == 1


@gloo_and_fake(2)
def test_every_step_in_one_recording_sends_the_same(comm_mode, device_mesh):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def three_steps():
        for _ in range(3):
            step(model)
            optimizer.step()
            optimizer.zero_grad()

    witnessed(comm_mode, model, three_steps)
    assert lines(comm_mode) == STEP * 3


@gloo_and_fake(2)
def test_state_dict_full_tensors_gather_by_dtensor(comm_mode, device_mesh):
    model = shard(Model(blocks=1), device_mesh())

    def gather_all():
        for value in model.state_dict().values():
            value.full_tensor()

    witnessed(comm_mode, model, gather_all)
    assert lines(comm_mode) == [
        f"outside {name} all_gather[dp] {LINEAR_NBYTES} < -"
        for name in ("embed", "layers.0.up", "layers.0.down", "head")
    ]
    assert {event.source.value for event in comm_mode.events} == {"dtensor"}
