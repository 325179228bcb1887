"""Findings against the checks that torch has, but runs for FSDP1's auto-wrap only."""

import re
import warnings

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from models import TokenModel
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import _wrap_utils, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.tree.finding import FindingSettings


@pytest.fixture(autouse=True, scope="module")
def _four_ranks():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    dist.destroy_process_group()


CPU = torch.device("cpu")
EVERY_BYTE_COUNTS = FindingSettings(small_nbytes=0)
NAMES = [name for name, _ in TokenModel().named_parameters()]


@settings(max_examples=40, deadline=None)
@given(frozen=st.sets(st.sampled_from(NAMES)), wraps_root=st.booleans())
def test_mixed_frozen_follows_torchs_advice(frozen, wraps_root):
    model = TokenModel()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = name not in frozen
    targets = {*model.layers, *([model] if wraps_root else [])}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _wrap_utils._validate_frozen_params(model, targets, set(), use_orig_params=True)
    refused = {re.match(r"(\S*) has both", str(entry.message))[1] for entry in caught}
    # A linear of which only the bias is frozen is in one unit whatever is wrapped.
    parted = {
        f"layers.{layer}"
        for layer in range(2)
        for name in ("up", "down")
        if {f"layers.{layer}.{name}.{kind}" for kind in ("weight", "bias")} <= frozen
    }

    for number, layer in enumerate(model.layers):
        model.layers[number] = Fsdp1(layer, device_id=CPU, use_orig_params=True)
    if wraps_root:
        model = Fsdp1(model, device_id=CPU, use_orig_params=True)
    found = {
        fqn
        for finding in capture_tree(model, EVERY_BYTE_COUNTS).findings
        if finding.code == "mixed-frozen"
        for fqn in finding.fqns
    }
    assert found == refused & {"", *parted}


def test_the_tree_has_the_marks_that_torchs_own_misses():
    """Fails when torch's sharded module tree learns of FSDP2: then it can serve as an oracle."""
    from torch.distributed.fsdp import _debug_utils

    model = TokenModel()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    text, mapping = _debug_utils._get_sharded_module_tree_with_module_name_to_fqns(model)
    tree = capture_tree(model)
    assert "FULLY SHARDED" not in text
    assert mapping == {}
    # Apart from the marks, and from torch naming the classes that fully_shard made, they agree.
    ours = [line.removesuffix(" FULLY SHARDED") for line in str(tree).splitlines()]
    assert [line.replace("[FSDP", "[") for line in text.splitlines()] == ours
    assert str(tree).count("FULLY SHARDED") == 3
