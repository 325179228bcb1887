"""How modules and groups are named: by nothing that a wrapper or a counter adds."""

import pytest
from torch import nn

from pytest_fsdp_comm.recording.mesh_axes import _name_of
from pytest_fsdp_comm.recording.owners.module_names import ModuleNames, clean_fqn


@pytest.mark.parametrize(
    ("name", "clean"),
    [
        ("_orig_mod.layers.0", "layers.0"),
        ("layers.0._checkpoint_wrapped_module.up", "layers.0.up"),
        ("_fsdp_wrapped_module.layers.0._fsdp_wrapped_module", "layers.0"),
        ("my_orig_mod.x", "my_orig_mod.x"),
        ("", ""),
    ],
)
def test_wrappers_leave_no_trace_in_names(name, clean):
    assert clean_fqn(name) == clean


def test_modules_are_named_relative_to_their_outermost_module():
    inner = nn.Linear(1, 1)
    first, second = nn.Sequential(inner, nn.ReLU()), nn.Sequential(nn.ReLU())
    names = ModuleNames([first, second])
    assert names.fqn(first) == ""
    assert names.fqn(inner) == "0"
    assert names.fqn(second[0]) == "@2.0"
    assert names.fqn(None) is None
    assert names.fqn(nn.ReLU()) is None
    assert names.joined((inner, first[1])) == "0+1"
    assert names.joined(()) is None


@pytest.mark.parametrize(
    ("description", "ranks", "name"),
    [
        ("default_pg", (0, 1), "world"),
        ("mesh_dp", (0, 1), "dp"),
        ("mesh_dp_shard_cp", (0, 1), "dp_shard_cp"),
        ("undefined", (0, 2, 4), "size3.stride2"),
        ("undefined", (1, 3, 5), "size3.stride2"),
        ("undefined", (0, 1, 5), "size3"),
        ("undefined", (3,), "size1"),
        ("", (0, 1), "size2.stride1"),
    ],
)
def test_groups_are_named_without_counters(description, ranks, name):
    assert _name_of(description, ranks) == name
