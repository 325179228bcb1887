"""What simulated tensors know of their values, and what code that reads others is told."""

from itertools import product

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pytest_fsdp_comm.simulation.values import SimulatedTensors, SimulationError, values_of

OUTSIDE = torch.arange(4)


@pytest.fixture
def simulated():
    with SimulatedTensors(answers=True):
        yield


@pytest.mark.usefixtures("simulated")
def test_what_is_computed_from_known_values_is_known():
    positions = torch.arange(6)
    assert positions.sum().item() == 15
    assert positions.view(2, 3)[1].tolist() == [3, 4, 5]
    assert (positions > 3).nonzero().flatten().tolist() == [4, 5]
    sizes = torch.bincount(positions % 2)
    assert [int(size) for size in sizes] == [3, 3]
    assert torch.equal(positions, torch.arange(6))


@pytest.mark.usefixtures("simulated")
def test_a_write_reaches_all_that_share_the_memory():
    table = torch.zeros(2, 3, dtype=torch.int64)
    row = table[1]
    row += 7
    assert table.tolist() == [[0, 0, 0], [7, 7, 7]]
    table[0].copy_(torch.empty(3, dtype=torch.int64))
    for own in (table, row, table.T):
        with pytest.raises(SimulationError):
            own.flatten()[0].item()
    table = torch.ones(3, dtype=torch.int64)
    assert table[0].item() == 1


@pytest.mark.usefixtures("simulated")
def test_what_a_module_has_made_before_is_known_and_stays_as_it_is():
    doubled = OUTSIDE.view(2, 2).mul_(2)
    assert doubled.tolist() == [[0, 2], [4, 6]]
    assert values_of(OUTSIDE).tolist() == [0, 1, 2, 3]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(2),
        lambda: torch.empty(2),
        lambda: torch.zeros(2) + torch.randn(2),
        lambda: torch.zeros(2**18 + 1)[:2],
        lambda: torch.nn.Linear(2, 1)(torch.ones(2)),
    ],
)
def test_an_unknown_number_or_truth_is_answered(make):
    assert make()[0].item() == 1.0
    assert not (make() > 0)[0]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("read", "how"),
    [
        (lambda routed: routed[0].item(), "item"),
        (lambda routed: routed.tolist(), "item"),
        (lambda routed: range(routed[0]), "item"),
        (lambda routed: (routed > 1).nonzero(), "nonzero"),
        (lambda routed: routed[routed > 1], "nonzero"),
        (lambda routed: routed.unique(), "_unique2"),
    ],
)
def test_an_unknown_count_is_refused_with_the_line(read, how):
    routed = torch.randint(8, (4,))
    with pytest.raises(SimulationError) as refused:
        read(routed)
    text = str(refused.value)
    assert "tests/simulation/test_values.py:" in text
    assert f"({how})" in text
    assert "without simulate=" in text
    assert refused.value.__suppress_context__  # torch's error, which names no line


def test_a_strict_simulation_answers_nothing():
    with SimulatedTensors(answers=False):
        with pytest.raises(SimulationError, match=r"test_values\.py:\d+ reads values of a tensor"):
            torch.rand(1).item()
        assert torch.ones(1).item() == 1.0


CALLS = [
    *(lambda x, number=number: x + number for number in (1, 1.0, True, 1j)),
    *(lambda x, size=size: x.view(size) for size in ((2, 6), (6, 2), (-1,))),
    *(lambda x, keepdim=keepdim: x.sum(0, keepdim=keepdim) for keepdim in (False, True)),
    *(lambda x, dtype=dtype: x.to(dtype) for dtype in (torch.bfloat16, torch.int8)),
    *(lambda x, part=part: x[part] for part in (0, 1, slice(1, 2), slice(1, 3))),
    lambda x: x.t() + 1,
    lambda x: x.t().contiguous(),
    lambda x: x + x.t().reshape(3, 4),
    lambda x: x[1:] + 1,
    lambda x: x.detach() + 1,
    lambda x: torch.cat([x, x[:1]]),
    lambda x: torch.cat([x[:1], x]),
    lambda x: x.split([1, 2])[1],
    lambda x: x.split([2, 1])[1],
    lambda x: torch.empty_like(x, dtype=torch.float64),
    lambda x: torch.zeros(len(x)),
]


def test_results_are_remembered_with_all_that_they_depend_on():
    mode = SimulatedTensors(answers=True)

    def made(dtype, has_gradient, default, call):
        torch.set_default_dtype(default)
        try:
            own = call(torch.ones(3, 4, dtype=dtype).requires_grad_(has_gradient))
        finally:
            torch.set_default_dtype(torch.float32)
        return own.dtype, own.shape, own.stride(), own.storage_offset(), own.requires_grad

    inputs = ((torch.int64, False), (torch.float32, False), (torch.float32, True))
    cases = [
        (*given, default, call)
        for given, default, call in product(inputs, (torch.float32, torch.float64), CALLS)
    ]
    expected = [made(*case) for case in cases]
    with mode:
        assert [made(*case) for case in cases] == expected
        mode.cache_crosscheck_enabled = True
        before = FakeTensorMode.cache_info()
        assert [made(*case) for case in cases] == expected
    after = FakeTensorMode.cache_info()
    assert after.hits - before.hits > len(cases)
    assert after.misses == before.misses


@pytest.mark.usefixtures("simulated")
def test_a_number_that_is_computed_in_steps_is_known():
    step = torch.tensor(0.0)
    for _ in range(3):
        step += 1
    assert step.item() == 3.0
    assert step.constant is None
