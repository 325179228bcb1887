"""What a user reads who misspelt a name of a fixture's value."""

import re

import pytest

SOURCE = """
import copy
import inspect
import pytest
import torch

@pytest.fixture
def recorded(comm_mode):
    with comm_mode:
        pass
    return comm_mode

def test_positional_mesh(device_mesh):
    device_mesh((2,))

def test_snapshot(comm_snapshot):
    comm_snapshot(nam="second")

def test_positional_snapshot(comm_snapshot):
    comm_snapshot("second")

def test_method(recorded):
    recorded.count("all_gather")

def test_property(recorded):
    recorded.nbyte

def test_argument(recorded):
    recorded.counts(phse="forward")

def test_block(comm_mode):
    comm_mode(torch.nn.Linear(1, 1), trace=True)

def test_tree_argument(fsdp_tree):
    fsdp_tree(torch.nn.Linear(1, 1), dept=1)

def test_factory(fsdp_tree):
    fsdp_tree.sav("x.html")

def test_tree(fsdp_tree):
    fsdp_tree(torch.nn.Linear(1, 1)).finding

def test_info(dist_info):
    dist_info.worldsize

def test_right(recorded, fsdp_tree, dist_info):
    assert not hasattr(recorded, "nbyte")
    assert "counts" in dir(recorded)
    assert list(inspect.signature(recorded.counts).parameters) == ["kind", "phase", "owner", "axis"]
    tree = fsdp_tree(torch.nn.Linear(1, 1))
    assert copy.copy(tree) == copy.deepcopy(tree) == tree
    assert copy.copy(dist_info) == dist_info
"""
ERRORS = {
    "test_positional_mesh": (
        "TypeError: device_mesh: too many positional arguments; write device_mesh(dp=2, tp=-1)"
    ),
    "test_snapshot": (
        "TypeError: comm_snapshot: got an unexpected keyword argument 'nam'; it takes name, "
        "allow_empty, allow_value_dependent, allow_idle_model, activation_nbytes; did you mean "
        "'name'?"
    ),
    "test_positional_snapshot": (
        "TypeError: comm_snapshot: too many positional arguments; write "
        'comm_snapshot(name="second", allow_empty=True)'
    ),
    "test_method": "AttributeError: comm_mode has no attribute 'count'; it has advanced_module_tr",
    "test_property": "timings; did you mean 'nbytes'?",
    "test_argument": (
        "TypeError: comm_mode.counts: got an unexpected keyword argument 'phse'; write "
        "comm_mode.counts(kind=None, *, phase=None, owner=None, axis=None); did you mean 'phase'?"
    ),
    "test_block": (
        "TypeError: comm_mode: got an unexpected keyword argument 'trace'; write "
        "comm_mode(model, *, trace_operations=None, estimate=False)"
    ),
    "test_tree_argument": (
        "TypeError: fsdp_tree: got an unexpected keyword argument 'dept'; write fsdp_tree(model)"
    ),
    "test_factory": (
        "AttributeError: fsdp_tree has no attribute 'sav'; it has expect, handles, of_all_ranks, "
        "save, show, states; did you mean 'save'?"
    ),
    "test_tree": "AttributeError: fsdp_tree(model) has no attribute 'finding'; it has backend, ",
    "test_info": (
        "AttributeError: dist_info has no attribute 'worldsize'; it has backend, device, "
        "local_rank, rank, world_size; did you mean 'world_size'?"
    ),
}


@pytest.fixture(scope="module")
def output(run_session):
    return run_session(SOURCE).output


@pytest.mark.parametrize("name", ERRORS)
def test_a_misspelt_name_is_answered_with_the_existing_names(output, name):
    _, _, report = output.partition(f"_ {name} _")
    report = re.split("\n____|\n====", report)[0]
    (error,) = [line for line in report.splitlines() if line[:4] == "E   "]
    assert ERRORS[name] in error
    assert "suggestions.py" not in report


def test_correct_names_work_as_before(output):
    assert "11 failed, 1 passed" in output
