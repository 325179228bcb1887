"""The private names of torch and Python that running ranks relies on: fails when one moves."""

import subprocess
import sys
from importlib import metadata

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pytest_fsdp_comm.errors import FsdpCommError, UpstreamChangedError
from pytest_fsdp_comm.ranks.rank.process_group import join_fake_group, join_group

pytestmark = pytest.mark.upstream


def code_constants(code):
    """Every name and constant of a function and of those inside it."""
    inner = [constant for constant in code.co_consts if hasattr(constant, "co_code")]
    return {*code.co_names, *(name for one in inner for name in code_constants(one))}


EXIT = """
import atexit, weakref
from pytest_fsdp_comm.ranks.rank import processes
class Owner: pass
ran, owner = [], Owner()
weakref.finalize(owner, ran.append, "of the parent")
atexit.register(ran.append, "of the parent")
processes.forget_exit_functions()
{register}
print(processes.run_exit_functions(), ran)
"""


@pytest.mark.parametrize(
    ("register", "found"),
    [
        ("", "[] []\n"),
        ("atexit.register(ran.append, 'own')", "[] ['own']\n"),
        ("weakref.finalize(Owner, ran.append, 'own')", "[] ['own']\n"),
    ],
    ids=["none", "atexit", "finalizer"],
)
def test_what_is_registered_for_the_exit_is_noticed(register, found):
    code = EXIT.format(register=register)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(found)


def test_torch_lists_all_groups_and_names_each_unit():
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    join_fake_group(0, 2)
    try:
        ((group, ranks),) = distributed_c10d._world.pg_group_ranks.items()
        assert sorted(ranks) == [0, 1]
        assert isinstance(group.group_name, str)
        assert isinstance(group.group_desc, str)
    finally:
        dist.destroy_process_group()
    assert "_module_fqn" in code_constants(FSDPParamGroup.__init__.__code__)


def test_a_fake_group_that_moved_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.testing._internal.distributed.fake_pg", None)
    with pytest.raises(UpstreamChangedError) as caught:
        join_fake_group(0, 2)
    assert str(caught.value) == (
        f"torch {metadata.version('torch')} no longer has "
        "torch.testing._internal.distributed.fake_pg.FakeStore, which the fake backend relies on; "
        "pytest-fsdp-comm was written for torch 2.7 to 2.15: use one of these versions, or upgrade "
        "pytest-fsdp-comm, or run this test with backend='gloo'"
    )


def test_group_made_at_import_raises_with_remedy():
    join_fake_group(0, 2)
    try:
        with pytest.raises(FsdpCommError) as caught:
            join_group(None)
    finally:
        dist.destroy_process_group()
    assert "a conftest.py, a test module or a plugin created a process group" in str(caught.value)
    assert "Remove that init_process_group(), or move it into a fixture" in str(caught.value)
