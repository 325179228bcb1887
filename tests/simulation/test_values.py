"""What simulated tensors know of their values, and what code that reads others is told."""

from itertools import product

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from pytest_fsdp_comm.simulation import memory
from pytest_fsdp_comm.simulation.values import (
    SimulatedTensors,
    SimulationError,
    await_and_view_values,
)
from pytest_fsdp_comm.simulation.world import simulate_rank as simulation

OUTSIDE = torch.arange(4)


@pytest.fixture
def simulated():
    with SimulatedTensors(assumes=True):
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
    table[0].copy_(torch.rand(3).long())
    for own in (table, row, table.T):
        with pytest.raises(SimulationError):
            own.flatten()[0].item()
    table = torch.ones(3, dtype=torch.int64)
    assert table[0].item() == 1


@pytest.mark.usefixtures("simulated")
def test_outer_tensors_are_known_and_writable():
    doubled = OUTSIDE.view(2, 2).mul_(2)
    assert doubled.tolist() == [[0, 2], [4, 6]]
    assert await_and_view_values(OUTSIDE).tolist() == [0, 2, 4, 6]


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.rand(2),
        lambda: torch.empty(2),
        lambda: torch.zeros(2) + torch.randn(2),
        lambda: torch.nn.Linear(2, 1)(torch.ones(2)),
    ],
)
def test_an_unknown_number_or_truth_is_answered(make):
    assert make()[0].item() == 1.0
    assert not (make() > 0)[0]


@pytest.mark.usefixtures("simulated")
def test_single_uniform_number_is_drawn():
    # Augmentations of images draw numbers like this, and check their range.
    torch.manual_seed(0)
    first, second = (float(torch.empty(1).uniform_(-0.5, 0.5)) for _ in range(2))
    with unset_fake_temporarily():
        torch.manual_seed(0)
        expected = [float(torch.empty(1).uniform_(-0.5, 0.5)) for _ in range(2)]
    assert [first, second] == expected
    # Weights stay unknown.
    assert torch.empty(2).uniform_(-0.5, 0.5)[0].item() == 1.0
    assert torch.nn.Linear(4, 1).bias.item() == 1.0


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("read", "how"),
    [
        (lambda routed: routed[0].item(), "item"),
        (lambda routed: routed.tolist(), "item"),
        (lambda routed: range(routed[0]), "item"),
        (lambda routed: (routed > 1).nonzero(), "nonzero"),
        (lambda routed: routed[routed > 1], "a boolean mask"),
        (lambda routed: routed.unique(), "_unique2"),
    ],
)
def test_an_unknown_count_is_refused_with_the_line(read, how):
    routed = torch.rand(4).mul(8).long()
    with pytest.raises(SimulationError) as refused:
        read(routed)
    text = str(refused.value)
    assert "tests/simulation/test_values.py:" in text
    assert f"({how})" in text
    assert "without simulate=" in text
    assert refused.value.__suppress_context__  # torch's error, which names no line


def test_a_strict_simulation_answers_nothing():
    with SimulatedTensors(assumes=False):
        with pytest.raises(SimulationError, match=r"test_values\.py:\d+ reads tensor values"):
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


def test_cache_key_has_all_that_results_depend_on():
    mode = SimulatedTensors(assumes=True)

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


def packed():
    sequences = nn.utils.rnn.pack_padded_sequence(
        torch.rand(2, 5, 3), torch.tensor([5, 2]), batch_first=True
    )
    return sequences.batch_sizes.tolist(), sequences.data.shape


def jagged():
    nested = torch.nested.nested_tensor_from_jagged(torch.rand(5, 4), torch.tensor([0, 3, 5]))
    padded = torch.nested.to_padded_tensor(nn.Linear(4, 2)(nested), 0.0)
    return nested.offsets().tolist(), padded.shape


def written_numpy():
    array = np.arange(4)
    torch.from_numpy(array)[1:].add_(1)
    return array.tolist()


def masked():
    labels = torch.tensor([1, -100, 2])
    logits = torch.rand(3, 4, requires_grad=True)
    logits[labels != -100].sum().backward()
    return logits.grad.shape, torch.rand(3, 4).masked_select(labels[:, None] > 0).shape


def replaced():
    own = torch.arange(3)
    own.data = torch.arange(5, 8)
    return own.tolist()


def drawn():
    torch.manual_seed(0)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(0))
    mask = torch.bernoulli(torch.full((8, 512), 0.5)).bool()
    choice = torch.multinomial(torch.tensor([0.2, 0.8]), 4, replacement=True)
    return order.tolist(), mask.sum().item(), choice.tolist(), torch.randint(9, (3,)).tolist()


def refilled():
    own = torch.rand(3).long()
    own.copy_(torch.arange(3))
    other = torch.rand(2, 2).new_zeros(3, dtype=torch.int64)
    return own.tolist(), other.tolist(), torch.ones_like(torch.rand(2), dtype=torch.bool).tolist()


REAL = {
    "all of many": lambda: torch.ones(8, 65536).all().item(),
    "count of many": lambda: (torch.zeros(8, 65536, dtype=torch.int64) != -100).sum().item(),
    "count of drawn": lambda: (torch.randint(0, 100, (4, 32)) != -100).sum().item(),
    "float between": lambda: torch.tensor([3, 5]).float().max().int().item(),
    "mean of a mask": lambda: bool(torch.ones(3).bool().float().mean() > 0.5),
    "list of tensors": lambda: torch.tensor([[torch.tensor(3), 1], [2, torch.tensor(4)]]).tolist(),
    "indices": lambda: [len(part) for part in torch.tensor_split(torch.rand(6), torch.tensor([2]))],
    "indices by name": lambda: [
        len(part)
        for part in torch.tensor_split(
            input=torch.rand(6), tensor_indices_or_sections=torch.tensor([2])
        )
    ],
    "an array by name": lambda: torch.asarray(obj=[1, 2]).tolist(),
    "conversions": lambda: (
        torch.tensor([2, 0]).bool().tolist(),
        torch.tensor([2.5]).byte().tolist(),
    ),
    "written twice": lambda: (
        torch.zeros(1).long().index_add_(0, torch.tensor([0]), torch.tensor([4])).item()
    ),
    "an array": lambda: np.asarray(torch.arange(3)).tolist(),
    "an array that is written": written_numpy,
    "replaced data": replaced,
    "refilled": refilled,
    "masks of floats": masked,
    "random integers": drawn,
    "packed": packed,
    "jagged": jagged,
}


@pytest.mark.parametrize("small", [0, memory._SMALL])
@pytest.mark.parametrize("name", REAL)
def test_integers_are_those_of_a_real_rank(name, small, monkeypatch):
    """Computed at once, or when they are read."""
    monkeypatch.setattr(memory, "_SMALL", small)
    expected = REAL[name]()
    with simulation(assumes=False):
        assert REAL[name]() == expected


@pytest.mark.usefixtures("simulated")
def test_write_keeps_values_that_were_computed_before():
    own = torch.arange(memory._SMALL + 1)
    doubled, row = own * 2, own[3:]
    row.zero_()
    assert (doubled[5].item(), own[2].item(), own[3].item()) == (10, 2, 0)


def test_unknown_floats_are_finite_without_an_answer():
    with SimulatedTensors(assumes=False):
        x = torch.rand(3)
        assert torch.isfinite(x).tolist() == [True] * 3
        assert not (torch.isnan(x) | torch.isinf(x)).any()
        assert torch.eq(x, x).all()
        assert (x == float("-inf")).sum().item() == 0
        with torch.inference_mode():
            assert torch.isfinite(torch.rand(2)).all()
        with pytest.raises(SimulationError, match=r"Use simulate=True, which assumes"):
            bool(x[0] < 2)


@pytest.mark.usefixtures("simulated")
def test_value_of_a_larger_tensor_names_the_limit():
    assert torch.ones(2**24, dtype=torch.bool).all()
    large = torch.ones(2**24 + 1, dtype=torch.bool)
    large[0] = False
    for read in (lambda: bool(large.all()), lambda: int(large[0]), large.nonzero):
        with pytest.raises(SimulationError, match=r"more than 16_777_216 elements \(2\*\*24\)"):
            read()


@pytest.mark.usefixtures("simulated")
def test_loop_that_waits_for_a_value_is_an_error():
    def wait():
        while not (torch.rand(3) > 0).any():
            pass

    with pytest.raises(SimulationError, match=r"values\.py:\d+ has read .* 10_000 times"):
        wait()


@pytest.mark.usefixtures("simulated")
@pytest.mark.parametrize(
    ("make", "cure"),
    [
        (lambda: torch.rand(4).mul(9).long().sum(), "torch.randint"),
        (lambda: torch.bincount(torch.rand(4, 8).topk(2).indices.flatten()), "simulation_splits"),
        (lambda: (torch.rand(4, 8).argmax(-1) == torch.arange(4)).sum() + 0, "Log the mean"),
    ],
)
def test_unknown_count_gets_the_cure_of_its_origin(make, cure):
    with pytest.raises(SimulationError) as refused:
        make().item()
    others = {"torch.randint(", "simulation_splits", "Log the mean", "real="} - {cure, cure + "("}
    assert cure in str(refused.value)
    assert not [other for other in others if other in str(refused.value)]


@pytest.mark.usefixtures("simulated")
def test_or_and_of_a_deciding_value_is_known():
    """`True | x` is True for every x, which ends generation at its maximum length."""
    true, false = torch.ones(3, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)
    other = torch.rand(2, 3) > 0.5
    assert (true | other).tolist() == [[True] * 3] * 2
    assert torch.logical_or(other, true).all()
    assert (torch.ones(3, dtype=torch.int64) & ~(true | other)).max() == 0
    assert (other.long() & false).tolist() == [[0] * 3] * 2
    assert (~(other & false)).tolist() == [[True] * 3] * 2
    assert not torch.logical_and(false, other).any()
    true |= other[0]
    assert true.tolist() == [True] * 3
    for open_one in (
        torch.tensor([True, False, True]) | other,
        ~false & other,
        other.long() | true,
    ):
        with pytest.raises(SimulationError):
            open_one.long().sum().item()


@pytest.mark.usefixtures("simulated")
def test_ctc_loss_is_sized_by_its_lengths():
    scores = torch.rand(50, 2, 20, requires_grad=True)
    labels, lengths = torch.randint(1, 20, (2, 10)), torch.tensor([10, 3])
    loss = nn.functional.ctc_loss(scores.log_softmax(2), labels, torch.tensor([50, 40]), lengths)
    loss.backward()
    assert (loss.shape, scores.grad.shape) == ((), scores.shape)
    unknown = torch.rand(2).long()
    with pytest.raises(SimulationError, match="they depend on floats"):
        nn.functional.ctc_loss(scores.log_softmax(2), labels, unknown, lengths)


@pytest.mark.distributed(world_size=2, simulate=True)
def test_tensor_of_file_has_its_values(tmp_path):
    (tmp_path / "tokens").write_bytes(bytes(range(16)))
    tokens = torch.from_file(str(tmp_path / "tokens"), size=16, dtype=torch.uint8)
    assert (tokens[3:].long() + 1).tolist() == [*range(4, 17)]


@pytest.mark.usefixtures("simulated")
def test_sparse_embedding_trains():
    model = nn.Embedding(10, 4, sparse=True)
    model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad.layout is torch.sparse_coo
    torch.optim.SparseAdam(model.parameters()).step()


@pytest.mark.distributed(world_size=2, simulate=True)
def test_future_of_work_has_its_results():
    future = dist.all_reduce(torch.ones(4), async_op=True).get_future()
    assert future.then(lambda done: done.value()[0] * 2).wait().tolist() == [4.0] * 4
    parts = [torch.empty(2) for _ in range(2)]
    future = dist.all_gather(parts, torch.tensor([1.0, 2.0]), async_op=True).get_future()
    assert torch.cat(future.wait()[0]).tolist() == [1.0, 2.0] * 2
