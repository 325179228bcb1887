"""An all-gather has few models, from the call to the failure text."""

import sys
from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.snapshots.documents import SnapshotText

# As it was issued, with its names, of an owner with the lines that issued it, and where both sides
# differ, with the lines of what is new.
MODELS = {"Pending", "Collective", "Calls", "Site", "Row", "Change", "NewCalls"}
# Gathered in bfloat16 and reduced in float32, with widths that are prime: what is sent of one unit
# and of the other has four sizes.
NBYTES = 2 * 4 * 7919
OTHER_NBYTES = {4 * 4 * 7919, 2 * 4 * 6131, 4 * 4 * 6131}


class Models:
    """The package's types of which an instance held one all-gather, and no other call."""

    def __init__(self):
        self.names = set()
        # Each instance that holds a call (kept alive, so that ids stay unique), and sizes.
        self._held = {}

    def __call__(self, frame, event, result):
        """As `sys.setprofile` calls it: a value is complete where its constructor returns."""
        if event != "return":
            return
        is_tuple = isinstance(result, tuple) and type(result) is not tuple
        made = frame.f_locals.get("self") if frame.f_code.co_name == "__init__" else None
        made = result if is_tuple else made
        if not type(made).__module__.startswith("pytest_fsdp_comm."):
            return
        if is_dataclass(made):
            parts = [getattr(made, field.name, None) for field in fields(made)]
        else:
            slots = [getattr(made, name, None) for name in getattr(made, "__slots__", ())]
            parts = [*made] if is_tuple else [*getattr(made, "__dict__", {}).values(), *slots]
        found = set().union(*map(self._found, parts))
        if found:
            self._held[id(made)] = (made, found)
        if found == {NBYTES}:
            self.names.add(type(made).__name__)

    def _found(self, value, depth=0):
        if type(value) is int:
            return {value} & {NBYTES, *OTHER_NBYTES}
        if id(value) in self._held:
            return self._held[id(value)][1]
        if isinstance(value, dict):
            value = [*value, *value.values()]
        if isinstance(value, tuple | list | set | frozenset) and depth < 3:
            return set().union(*(self._found(part, depth + 1) for part in value))
        return set()


@pytest.mark.distributed(world_size=4, backend="fake")
def test_an_all_gather_has_no_further_models(device_mesh, comm_mode):
    mesh = device_mesh()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    layers = [nn.Linear(7919, 4, bias=False), nn.Linear(4, 6131, bias=False)]
    model = nn.Sequential(*layers, nn.Linear(6131, 1, bias=False))
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)

    def profile(steps):
        with comm_mode(model):
            for _ in range(steps):
                model(torch.zeros(1, 7919)).sum().backward()
        return merge([fold(comm_mode.recording)] * 4, ranks=(0, 1, 2, 3))

    models = Models()
    sys.setprofile(models)
    try:
        reviewed = str(SnapshotText.from_profile(profile(1), where="reviewed"))
        comparison = compare(SnapshotText(reviewed, where="reviewed").profile, profile(2))
        text = render_comparison(comparison, snapshot="reviewed")
    finally:
        sys.setprofile(None)
    assert f"all_gather[dp] x1 of {NBYTES:_} B" in reviewed
    assert "  all calls: twice as many" in text.body
    # Of a unit, not of a call: when it is gathered and freed; of a kind and axis: their sums.
    assert models.names - {"Reshard", "Volume"} == MODELS
