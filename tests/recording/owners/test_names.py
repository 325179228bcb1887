"""Names of modules and groups, without parts added by wrappers or counters."""

import pytest

from pytest_fsdp_comm.recording.mesh_axes import _choose_group_name
from pytest_fsdp_comm.recording.owners.module_names import clean_fqn


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
    assert _choose_group_name(description, ranks) == name
