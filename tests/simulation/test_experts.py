"""Experts on simulated ranks: routing that is known, declared, or refused."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from oracle import lines
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm.simulation.values import SimulationError

RANKS, EXPERTS, TOKENS, WIDTH = 4, 8, 48, 16
LOCAL = EXPERTS // RANKS
FLOAT, LONG = 4, 8


class Experts(nn.Module):
    """Two experts a rank; `choose` gives the experts of each token."""

    def __init__(self, group, choose):
        super().__init__()
        self.group, self.choose = group, choose
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LOCAL))

    def forward(self, x):
        scores = self.router(x)
        chosen = self.choose(scores)
        counts = torch.bincount(chosen.flatten(), minlength=EXPERTS)
        received = torch.zeros_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        sends = counts.view(RANKS, LOCAL).sum(1).tolist()
        receives = received.view(RANKS, LOCAL).sum(1).tolist()
        order = chosen.flatten().argsort(stable=True)
        tokens = x[order // chosen.shape[1]] * scores.flatten()[order % EXPERTS, None]
        tokens = functional.all_to_all_single_autograd(tokens, receives, sends, self.group)
        of_expert = torch.repeat_interleave(torch.arange(EXPERTS) % LOCAL, received)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            places = (of_expert == number).nonzero().flatten()
            out = out.index_add(0, places, expert(tokens[places]))
        out = functional.all_to_all_single_autograd(out, sends, receives, self.group)
        return x.index_add(0, order // chosen.shape[1], out)


def fixed(_scores):
    """More tokens for some experts than for others, by a rule that every rank knows."""
    return torch.arange(TOKENS)[:, None].square() % EXPERTS


def recorded(comm_mode, device_mesh, choose):
    mesh = device_mesh(ep=RANKS)
    model = nn.Sequential(Experts(mesh.get_group(), choose))
    fully_shard(model, mesh=mesh, ignored_params={*model[0].experts.parameters()})
    with comm_mode(model):
        model(torch.ones(TOKENS, WIDTH)).sum().backward()
    return lines(comm_mode)


def expected(rank, counts):
    """What rank `rank` sends if each rank has `counts` tokens for each of all experts."""
    mine = [sum(counts[at : at + LOCAL]) for at in range(0, EXPERTS, LOCAL)][rank]
    moved = max(sum(counts), RANKS * mine) * WIDTH * FLOAT
    unit = (EXPERTS * WIDTH + EXPERTS) * FLOAT
    return [
        f"forward . all_gather[ep] {unit} < .",
        f"forward 0 all_to_all[ep] {EXPERTS * LONG} < 0",
        f"forward 0 all_to_all[ep] {moved} < 0",
        f"forward 0 all_to_all[ep] {moved} < 0",
        f"backward 0 all_to_all[ep] {moved} < 0",
        f"backward 0 all_to_all[ep] {moved} < 0",
        f"backward . reduce_scatter[ep] {unit} < .",
    ]


def simulated(world_size=RANKS, **arguments):
    return pytest.mark.distributed(world_size, simulate=True, ranks=range(RANKS), **arguments)


def on_gloo_and_simulated(test):
    ways = [
        pytest.param("gloo", marks=pytest.mark.distributed(RANKS, backend="gloo"), id="gloo"),
        pytest.param("fake", marks=simulated(), id="simulated"),
    ]
    return pytest.mark.parametrize("way", ways, indirect=True)(pytest.mark.usefixtures("way")(test))


@pytest.fixture
def way(request):
    return request.param


@on_gloo_and_simulated
def test_fixed_routing_sends_what_it_says(way, comm_mode, device_mesh, dist_info):
    counts = [sum(place**2 % EXPERTS == own for place in range(TOKENS)) for own in range(EXPERTS)]
    assert len({*counts}) > 1
    assert recorded(comm_mode, device_mesh, fixed) == expected(dist_info.rank, counts)
    assert comm_mode.recording.gaps == ()
    # What is received is right only where all route alike, which nobody has declared.
    told = {(answer.value, answer.site) for answer in comm_mode.recording.answers}
    assert told == ({("mirrored", f"{__name__}:Experts.forward")} if way == "fake" else set())


CHOICES = {
    "topk": lambda scores: scores.topk(2, dim=-1).indices,
    "argmax": lambda scores: scores.argmax(dim=-1, keepdim=True),
    "max": lambda scores: scores.max(dim=1, keepdim=True).indices,
}


@pytest.mark.parametrize("choice", CHOICES)
@simulated(simulation_splits="even")
def test_experts_share_alike_what_is_declared_even(choice, comm_mode, device_mesh, dist_info):
    choose = CHOICES[choice]
    counts = [TOKENS * (2 if choice == "topk" else 1) // EXPERTS] * EXPERTS
    assert recorded(comm_mode, device_mesh, choose) == expected(dist_info.rank, counts)
    assert comm_mode.recording.gaps == ()


@simulated(simulation_splits=[4, 2, 2, 1, 1, 1, 1, 0])
def test_shares_that_are_declared_decide_what_is_sent(comm_mode, device_mesh, dist_info):
    counts = [TOKENS * 2 * share // 12 for share in (4, 2, 2, 1, 1, 1, 1, 0)]
    found = recorded(comm_mode, device_mesh, CHOICES["topk"])
    assert found == expected(dist_info.rank, counts)
    assert comm_mode.recording.gaps == ()
    chosen = torch.rand(TOKENS, EXPERTS).topk(2).indices
    assert (chosen[:, 0] != chosen[:, 1]).all()
    with pytest.raises(SimulationError, match="item"):  # of another number: no choice of experts
        torch.rand(TOKENS, EXPERTS + 1).topk(2).indices.sum().item()


@simulated(simulation_splits="even")
def test_largest_of_a_scalar_is_no_choice_of_experts():
    assert torch.rand(()).max(dim=-1).values.shape == ()


@simulated(simulation_splits=[6, 1, 1, 0, 0, 0, 0, 0])
def test_a_share_that_no_choice_can_have_is_refused():
    CHOICES["argmax"](torch.rand(TOKENS, EXPERTS))  # a single choice can have any share
    with pytest.raises(SimulationError) as refused:
        torch.rand(TOKENS, EXPERTS).topk(2)
    assert "test_experts.py:" in str(refused.value)
    assert str(refused.value).endswith(
        " chooses 2 of 8 experts for each token, so the share of an expert is at most 0.5, but "
        "simulation_splits has a share of 0.75: use smaller shares, or 'even'"
    )


@simulated()
def test_routing_error_has_line_and_remedies(comm_mode, device_mesh):
    with pytest.raises(SimulationError) as refused:
        recorded(comm_mode, device_mesh, CHOICES["topk"])
    text = str(refused.value)
    line = Experts.forward.__code__.co_firstlineno + 3
    assert f"tests/simulation/test_experts.py:{line} reads tensor values (bincount)" in text
    assert "use balanced routing" in text
    assert "simulation_splits='even'" in text
    assert "real ranks, without simulate=" in text


@simulated()
def test_reading_mirrored_values_is_recorded(comm_mode):
    ranks = [torch.empty(1, dtype=torch.int64) for _ in range(RANKS)]
    dist.all_gather(ranks, torch.tensor([dist.get_rank()]))
    # On other ranks it is another number: nothing here can know that.
    assert torch.cat(ranks).add(0)[1:].sum().item() == 3 * dist.get_rank()
    # It was read before the block, and may decide what is sent in it.
    with comm_mode:
        dist.barrier()
    (answer,) = comm_mode.recording.answers
    function = "test_reading_mirrored_values_is_recorded"
    assert (answer.value, answer.site, answer.how) == ("mirrored", f"{__name__}:{function}", "item")


@pytest.mark.distributed(RANKS, simulate="strict")
def test_a_strict_simulation_takes_others_for_nothing():
    total = torch.tensor(5)
    dist.all_reduce(total)
    with pytest.raises(
        SimulationError, match=r"\(item\)\. A simulated rank can only assume .*'even'"
    ):
        total.item()


def sent():
    return torch.arange(8)


def in_place(operation, **arguments):
    def run():
        own = sent()
        operation(own, **arguments)
        return own

    return run


def into(numel, operation):
    """Of outputs that have known values before, which no operation may leave there."""

    def run():
        out = torch.zeros(numel, dtype=torch.int64)
        alias = out.view(-1)
        operation(out, sent())
        return alias

    return run


def into_list(numels, operation, inputs=sent):
    def run():
        outs = [torch.empty(numel, dtype=torch.int64) for numel in numels]
        operation(outs, inputs())
        return torch.cat(outs)

    return run


def mine(rank):
    return [2 * rank, 2 * rank + 1]


ALL = [*range(8)]
EXCHANGES = {
    "all_reduce": (in_place(dist.all_reduce), lambda _: [4 * own for own in ALL]),
    "all_reduce max": (
        in_place(dist.all_reduce, op=dist.ReduceOp.MAX),
        lambda _: ALL,
    ),
    "all_reduce product": (
        in_place(dist.all_reduce, op=dist.ReduceOp.PRODUCT),
        lambda _: [own**4 for own in ALL],
    ),
    "all_reduce bxor": (in_place(dist.all_reduce, op=dist.ReduceOp.BXOR), lambda _: [0] * 8),
    "broadcast": (in_place(dist.broadcast, src=1), lambda _: ALL),
    "all_gather": (into_list([8] * 4, dist.all_gather), lambda _: ALL * 4),
    "all_gather_into_tensor": (into(32, dist.all_gather_into_tensor), lambda _: ALL * 4),
    "reduce_scatter_tensor": (
        into(2, dist.reduce_scatter_tensor),
        lambda rank: [4 * own for own in mine(rank)],
    ),
    "reduce_scatter": (
        into_list([2], lambda outs, own: dist.reduce_scatter(outs[0], [*own.chunk(4)])),
        lambda rank: [4 * own for own in mine(rank)],
    ),
    "all_to_all_single": (into(8, dist.all_to_all_single), lambda rank: mine(rank) * 4),
    "unequal all_to_all_single": (
        lambda: functional.all_to_all_single(
            sent(),
            [dist.get_rank() * 2 + 1 if dist.get_rank() < 2 else 2] * 4,
            [1, 3, 2, 2],
            dist.group.WORLD,
        ),
        lambda rank: [[0], [1, 2, 3], [4, 5], [6, 7]][rank] * 4,
    ),
    "functional all_gather": (
        lambda: functional.all_gather_tensor(sent(), 0, dist.group.WORLD),
        lambda _: ALL * 4,
    ),
}


@pytest.mark.filterwarnings("ignore:.*is deprecated. Please use:FutureWarning")
@on_gloo_and_simulated
def test_collective_result_assumes_equal_ranks(dist_info):
    for name, (run, expected_on) in EXCHANGES.items():
        assert run().tolist() == expected_on(dist_info.rank), name


@pytest.mark.parametrize(
    "exchange",
    [
        lambda out: dist.all_reduce(out.add_(torch.rand(8).long())),
        lambda out: dist.all_to_all_single(out, torch.rand(8).long()),
        lambda out: dist.all_to_all_single(out, torch.arange(8), [1, 1, 2, 4], [2] * 4),
        lambda out: dist.reduce(out, 0),
        lambda out: dist.recv(out, 1),
    ],
)
@pytest.mark.distributed(RANKS, simulate=True)
def test_collective_of_unknown_values_is_unknown(exchange):
    out = torch.zeros(8, dtype=torch.int64)
    exchange(out)
    with pytest.raises(SimulationError):
        out.tolist()
