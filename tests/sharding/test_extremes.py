"""Extreme inputs: objects that are not models, half-built, very deep or very wide models."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import format_tree, parse_tree
from torch import nn

from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.sharding.capture import capture_tree
from pytest_fsdp_comm.tree.profile import tree_facts

COUNT = 12_000


class Chain(nn.Module):
    """One link of a chain; the parameters make every link count."""

    def __init__(self, parameter):
        super().__init__()
        self.p = parameter


@pytest.mark.parametrize(
    ("given_", "problem"),
    [
        (
            None,
            "fsdp_tree(model) expects a torch.nn.Module, or a list of them, got NoneType; pass the "
            "model itself",
        ),
        (
            nn.Linear,
            "fsdp_tree(model) expects a torch.nn.Module, or a list of them, got the class Linear "
            "itself; pass an instance",
        ),
    ],
)
def test_what_is_no_model_is_refused(given_, problem):
    with pytest.raises(RecordingError) as caught:
        capture_tree(given_)
    assert str(caught.value) == problem


def test_a_half_built_module_is_refused():
    class Careless(nn.Module):
        def __init__(self):
            pass

    model = nn.Sequential(nn.Linear(1, 1), Careless())
    with pytest.raises(RecordingError) as caught:
        capture_tree(model)
    assert str(caught.value) == (
        "fsdp_tree found an uninitialized module: 1 (Careless) has no _modules; call "
        "super().__init__() first in its __init__"
    )


def test_a_parameter_without_a_shape_is_refused():
    model = nn.Sequential(nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(RecordingError) as caught:
        capture_tree(model)
    assert str(caught.value) == (
        "fsdp_tree found a parameter without a shape: weight of module 1 is still lazy; run the "
        "model once before you shard it"
    )


def test_a_module_that_contains_itself_is_drawn_once():
    model = nn.Sequential(nn.Linear(2, 2))
    model.add_module("itself", model)
    assert str(capture_tree(model)) == (
        "[Sequential]\n    0[Linear]\n    itself[Sequential] is (root)"
    )


def test_model_of_10_000s_of_nested_modules():
    model = bottom = Chain(nn.Parameter(torch.ones(2)))
    links = [model]
    for _ in range(COUNT):
        bottom._modules["c"] = bottom = Chain(nn.Parameter(torch.ones(2)))
        links.append(bottom)
    tree = capture_tree(model)
    assert len(tree.modules) == len(tree.parameters) == COUNT + 1
    assert tree.modules[-1].depth == COUNT
    assert len(tree.parameter_fqn(COUNT)) == 2 * COUNT + 1
    assert str(tree).endswith(f"(depth {COUNT}) ...c[Chain]")
    # torch's modules free their children by recursion.
    for link in links:
        link._modules.clear()


def test_model_of_10_000s_of_sibling_modules():
    weight = nn.Parameter(torch.ones(2, 3))
    model = nn.Module()
    for index in range(COUNT):
        model._modules[str(index)] = Chain(nn.Parameter(weight.detach()))
    tree = capture_tree(model)
    text = format_tree(tree)
    assert f"parameter {{0..{COUNT - 1}}}.p float32[2,3] unmanaged\n" in text
    assert parse_tree(text) == tree_facts(tree)


@st.composite
def modules(draw, depth=3):
    """A module with parameters and children at random, some of them shared."""
    module = nn.Module()
    for name in draw(st.sets(st.sampled_from("pqr"))):
        module.register_parameter(name, nn.Parameter(torch.empty(draw(st.integers(0, 5)), 2)))
    if depth:
        for name in draw(st.sets(st.sampled_from(["0", "1", "2", "10", "a b", "{x}"]))):
            module.add_module(name, draw(modules(depth=depth - 1)))
    below = [child for child in module.modules() if child is not module]
    if below and draw(st.booleans()):
        module.add_module("shared", draw(st.sampled_from(below)))
        draw(st.sampled_from(below)).tied = next(module.parameters(), None)
    return module


@settings(max_examples=30, deadline=None)
@given(modules())
def test_each_parameter_appears_once_and_bytes_add_up(model):
    tree = capture_tree(model)
    assert len(tree.parameters) == len(list(model.parameters()))
    names = [fqn for fqn, _ in tree.named_parameters()]
    names += [fqn for index in range(len(names)) for fqn in tree.tied_fqns(index)]
    assert len(set(names)) == len(names)
    assert set(names) <= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    nbytes = sum(tensor.numel() * tensor.element_size() for tensor in model.parameters())
    assert sum(entry.nbytes for entry in tree.parameters) == nbytes
    assert all(math.prod(entry.shape) == entry.local_numel for entry in tree.parameters)
    assert len(str(tree).splitlines()) == len(tree.modules)
    assert parse_tree(format_tree(tree)) == tree_facts(tree)
