"""What simulated tensors know of their values, and what code that reads others is told."""

import pytest
import torch

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


def test_a_strict_simulation_answers_nothing():
    with SimulatedTensors(answers=False):
        with pytest.raises(SimulationError, match=r"test_values\.py:\d+ reads values of a tensor"):
            torch.rand(1).item()
        assert torch.ones(1).item() == 1.0
