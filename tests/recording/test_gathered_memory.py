"""The bytes that count as gathered at once; `test_prefetch` covers each setting."""

import pytest
import torch
from models import FLOAT, VOCABULARY, WIDTH, Block, TokenModel, UnevenModel, shard
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecision, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from pytest_fsdp_comm.errors import RecordingError

LAYERS = 4
ROOT = 2 * VOCABULARY * WIDTH * FLOAT  # embed and head
LAYER = (WIDTH * 2 * WIDTH + 2 * WIDTH + 2 * WIDTH * WIDTH + WIDTH) * FLOAT  # up and down
fake = pytest.mark.distributed(world_size=4, backend="fake", scope="module")


def layered(device_mesh, **options):
    return shard(TokenModel(LAYERS), device_mesh(), **options)


def step(model):
    model(torch.arange(4).view(1, 4)).sum().backward()


def infer(model):
    with torch.no_grad():
        model(torch.arange(4).view(1, 4))


def wrapped(policy=None):
    model = FullyShardedDataParallel(
        TokenModel(LAYERS),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        mixed_precision=policy,
    )
    step(model)  # learns the order
    return model


@fake
def test_padding_is_not_counted(comm_mode, device_mesh):
    def peak(model):
        with comm_mode(model):
            model(torch.ones(1, 5)).sum().backward()
        return comm_mode.peak_gathered_nbytes, {event.nbytes for event in comm_mode.reshards}

    layer = (5 * 7 + 7 + 7 * 5 + 5) * FLOAT
    root = (5 * 5 + 5 + 5 * 3 + 3 + 3) * FLOAT  # the heads share their weight
    model = UnevenModel()
    for unit in (*model.layers, model):
        fully_shard(unit, mesh=device_mesh())
    assert peak(model) == (root + 2 * layer, {root, layer})
    for use_orig_params in (False, True):
        model = FullyShardedDataParallel(
            UnevenModel(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            use_orig_params=use_orig_params,
        )
        assert peak(model) == (root + 2 * layer, {root, layer})


@fake
@pytest.mark.parametrize("arrange", [layered, lambda _: wrapped()], ids=["FSDP2", "FSDP1"])
@pytest.mark.parametrize("is_given", [True, False], ids=["given", "bare"])
def test_root_gathered_before_block_counts_from_start(comm_mode, device_mesh, arrange, is_given):
    model = arrange(device_mesh)
    infer(model)  # leaves the root gathered, so the block does not gather it
    with comm_mode(model) if is_given else comm_mode:
        step(model)
    assert comm_mode.counts("all_gather", phase="forward") == LAYERS
    assert comm_mode.peak_gathered_nbytes == ROOT + 2 * LAYER


@fake
def test_units_gathered_before_and_throughout_count(comm_mode, device_mesh):
    model = layered(device_mesh)
    infer(model)
    model.layers[3].unshard()
    with comm_mode(model):
        model.layers[0].unshard()
        model.layers[0].reshard()
    assert comm_mode.peak_gathered_nbytes == ROOT + 2 * LAYER
    with comm_mode(model):
        pass
    assert comm_mode.peak_gathered_nbytes == ROOT + LAYER
    # Without a model, the mode does not know modules that do not act.
    with comm_mode:
        pass
    assert comm_mode.peak_gathered_nbytes == 0
    wrapper = wrapped()
    infer(wrapper)
    with comm_mode(wrapper):
        pass
    assert comm_mode.peak_gathered_nbytes == ROOT


@fake
def test_post_forward_shards_count_from_start(comm_mode, device_mesh):
    model = layered(device_mesh, reshard_after_forward=2)
    loss = model(torch.arange(4).view(1, 4)).sum()
    with comm_mode(model):
        pass
    assert comm_mode.peak_gathered_nbytes == ROOT + LAYERS * LAYER // 2
    with comm_mode(model):
        loss.backward()
    assert comm_mode.peak_gathered_nbytes == ROOT + 2 * LAYER // 2 + 2 * LAYER
    with comm_mode(model):
        pass
    assert comm_mode.peak_gathered_nbytes == 0


@fake
def test_unused_backward_prefetch_is_freed_at_its_end(comm_mode, device_mesh):
    class Unused(TokenModel):
        def forward(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers[:3]:
                x = layer(x)
            self.layers[3](x)
            return self.head(x)

    model = shard(Unused(LAYERS), device_mesh())
    with comm_mode(model):
        step(model)
        # The root prefetches layer 3, which has no gradient; layer 2 gathers itself and layer 1.
        peak = ROOT + 3 * LAYER
        for unit in (model, *model.layers[:3]):
            unit.unshard()
    assert comm_mode.peak_gathered_nbytes == peak
    unused = [event.action for event in comm_mode.reshards if event.module == "layers.3"]
    assert unused == ["unshard", "reshard", "unshard"]  # the last one, torch drops silently
    for unit in (model, *model.layers[:3]):
        unit.reshard()
    with comm_mode(model):
        model.layers[0].unshard()
    assert comm_mode.peak_gathered_nbytes == LAYER


@fake
def test_gather_of_earlier_block_counts_until_freed(comm_mode, device_mesh):
    model = layered(device_mesh)
    step(model)
    handle = model.layers[0].unshard(async_op=True)
    for finish in (lambda: None, handle.wait, model.layers[0].reshard):
        with comm_mode(model):
            finish()
        assert comm_mode.peak_gathered_nbytes == LAYER
    with comm_mode(model):
        pass
    assert comm_mode.peak_gathered_nbytes == 0


@fake
def test_a_state_dict_frees_what_is_gathered(comm_mode, device_mesh):
    model = layered(device_mesh)
    with comm_mode(model):
        infer(model)  # the root stays gathered
        model.state_dict()
        for layer in model.layers[:2]:
            layer.unshard()
    assert comm_mode.peak_gathered_nbytes == max(ROOT + LAYER, 2 * LAYER)


@fake
def test_full_parameters_are_held_in_full_precision(comm_mode):
    model = wrapped(MixedPrecision(param_dtype=torch.bfloat16))
    with comm_mode(model), FullyShardedDataParallel.summon_full_params(model):
        pass
    assert comm_mode.peak_gathered_nbytes == ROOT + LAYERS * LAYER
    assert {event.nbytes for event in comm_mode.reshards} == {ROOT, LAYER}


@fake
def test_a_plain_model_gathers_nothing(comm_mode):
    model = TokenModel(LAYERS)
    with comm_mode(model):
        step(model)
    assert comm_mode.peak_gathered_nbytes == 0


def test_without_a_recording_there_is_no_peak(comm_mode):
    with pytest.raises(RecordingError, match="comm_mode has no recording yet"):
        _ = comm_mode.peak_gathered_nbytes


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_keep_unsharded_storage"), reason="new in torch 2.15"
)
@fake
def test_storage_that_is_kept_after_resharding_counts(comm_mode, device_mesh):
    model = layered(device_mesh)
    with comm_mode(model):
        step(model)
    freed, gathers = comm_mode.peak_gathered_nbytes, comm_mode.counts("all_gather")
    model.set_keep_unsharded_storage(True)
    for _ in range(2):
        with comm_mode(model):
            step(model)
        held = [
            tensor.untyped_storage().nbytes()
            for module in (model, *model.layers)
            for group in module._get_fsdp_state()._fsdp_param_groups
            for param in group.fsdp_params
            for tensor in param.all_gather_outputs
        ]
        assert comm_mode.peak_gathered_nbytes == sum(held) == ROOT + LAYERS * LAYER > freed
        # It is gathered again nevertheless.
        assert comm_mode.counts("all_gather") == gathers
        assert {e.ahead for e in comm_mode.events if e.kind == "all_gather"} == {0, 1}
    model.set_keep_unsharded_storage(False)
    with comm_mode(model):
        step(model)
    with comm_mode(model):
        step(model)
    assert comm_mode.peak_gathered_nbytes == freed


@fake
def test_a_model_that_never_ran_holds_nothing(comm_mode, device_mesh):
    with comm_mode(layered(device_mesh)):
        pass
    assert comm_mode.peak_gathered_nbytes == 0
