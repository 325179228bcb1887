"""Ranks that diverge, and ranks that differ legitimately, from recordings made by hand."""

from dataclasses import replace

import pytest

from pytest_fsdp_comm.comm.divergence import find_divergence_of
from pytest_fsdp_comm.comm.events import (
    COLLECTIVE_KINDS,
    Collective,
    Phase,
    Recording,
    Role,
    Source,
)
from pytest_fsdp_comm.comm.mesh import axis_of

DP = axis_of("dp", range(4))
TP = axis_of("tp", range(2))


def call(kind="all_gather", owner=None, *, axis="dp", source=Source.USER, sent=8, **changes):
    call = Collective(
        index=0,
        kind=kind,
        op="c10d._op_",
        owner=owner,
        issued_in=None,
        phase=Phase.FORWARD,
        axis=axis,
        group_size=4,
        dtype="float32",
        nbytes_sent=sent,
        nbytes_received=sent,
        source=source,
        call_site="",
    )
    return replace(call, **changes)


def gather(owner, **changes):
    return call("all_gather", owner, source=Source.FSDP, role=Role.PARAMETERS, **changes)


def reduce(owner, *parameters, kind="reduce_scatter", **changes):
    changes = {"source": Source.FSDP, "role": Role.GRADIENTS, **changes}
    return call(kind, owner, parameters=parameters, **changes)


def recordings(*calls_of_ranks, axes=(DP,), world_size=4):
    return [
        Recording(
            rank=rank,
            world_size=world_size,
            backend="gloo",
            torch_version="2",
            mesh_axes=tuple(axes),
            collectives=tuple(calls),
        )
        for rank, calls in enumerate(calls_of_ranks)
    ]


def diverged(*calls_of_ranks, **changes):
    divergence = find_divergence_of(recordings(*calls_of_ranks, **changes))
    return "" if divergence is None else str(divergence)


def one_of_four(usual, other, **changes):
    """Return how ranks diverge if rank 1 makes other calls than ranks 0, 2 and 3."""
    return diverged(usual, other, usual, usual, **changes)


LAYERS = [gather(f"layers.{number}") for number in range(3)]
SWAPPED = [LAYERS[0], LAYERS[2], LAYERS[1]]


@pytest.mark.parametrize(
    ("usual", "other", "line"),
    [
        (LAYERS, SWAPPED, "#2 over dp: rank 1 gathers layers.2, ranks 0, 2-3 gather layers.1"),
        (
            [reduce("0")],
            [reduce("2")],
            "#1 over dp: rank 1 reduces gradients of 2, ranks 0, 2-3 reduce gradients of 0",
        ),
        (
            [reduce("", "a.weight")],
            [reduce("", "b.weight", "c.weight")],
            "#1 over dp: rank 1 reduces gradients of b.weight, c.weight, "
            "ranks 0, 2-3 reduce gradients of a.weight",
        ),
        (
            [reduce("mlp")],
            [reduce("mlp", "mlp.up")],
            "#1 over dp: rank 1 reduces gradients of mlp.up, "
            "ranks 0, 2-3 reduce gradients of all of mlp",
        ),
        (
            [gather(""), reduce("")],
            [reduce(""), gather("")],
            "#1 over dp: rank 1 calls reduce_scatter for (root), "
            "ranks 0, 2-3 call all_gather for (root)",
        ),
        (
            [call("all_reduce")],
            [call("all_reduce", sent=2048)],
            "#1 over dp: rank 1 calls all_reduce (2.0 KiB float32), "
            "ranks 0, 2-3 call all_reduce (8 B float32)",
        ),
        (
            [call("all_reduce", dtype="int32")],
            [call("all_reduce")],
            "#1 over dp: rank 1 calls all_reduce (8 B float32), "
            "ranks 0, 2-3 call all_reduce (8 B int32)",
        ),
        (
            [call("broadcast", root_rank=0)],
            [call("broadcast", root_rank=1)],
            "#1 over dp: rank 1 calls broadcast with root 1, "
            "ranks 0, 2-3 call broadcast with root 0",
        ),
        (
            [call("all_reduce", reduce_op="sum")],
            [call("all_reduce", reduce_op="max")],
            "#1 over dp: rank 1 calls all_reduce with max, ranks 0, 2-3 call all_reduce with sum",
        ),
        (
            LAYERS,
            LAYERS[:2],
            "#3 over dp: rank 1 makes no such call, ranks 0, 2-3 gather layers.2",
        ),
        (
            [call("barrier")],
            [],
            "#1 over dp: rank 1 makes no such call, ranks 0, 2-3 call barrier",
        ),
        # Hand-written data parallelism: both ranks reduce both gradients, in another order.
        (
            [reduce("0", source=Source.USER), reduce("1", source=Source.USER)],
            [reduce("1", source=Source.USER), reduce("0", source=Source.USER)],
            "#1 over dp: rank 1 reduces gradients of 1, ranks 0, 2-3 reduce gradients of 0",
        ),
    ],
)
def test_first_difference_is_named(usual, other, line):
    assert one_of_four(usual, other) == f"ranks diverge at call {line}"


def test_many_ways_are_folded():
    calls = [[gather(f"layers.{rank}")] for rank in range(4)]
    ranks = [*calls, *([calls[0]] * 2), [gather("layers.9")]]
    axis = axis_of("dp", range(7))
    assert diverged(*ranks, axes=[axis], world_size=7) == (
        "ranks diverge at call #1 over dp: rank 1 gathers layers.1, rank 2 gathers layers.2, "
        "rank 3 gathers layers.3, ranks 0, 4-6 act in 2 other ways"
    )


def test_earliest_difference_of_several_groups():
    axes = (DP, axis_of("world", range(4)))
    norm, loss = (call("all_reduce", axis="world", reduce_op=op) for op in ("sum", "max"))
    line = one_of_four([*LAYERS, norm], [loss, *SWAPPED], axes=axes)
    assert line.startswith("ranks diverge at call #1 over world: rank 1 ")


def test_parallel_groups_are_told_apart():
    axes = (axis_of("dp", (0, 2)), axis_of("tp", (0, 1)))
    line = diverged(LAYERS, LAYERS, LAYERS, SWAPPED, axes=axes)
    assert line == (
        "ranks diverge at call #2 over dp (ranks 1, 3): rank 1 gathers layers.1, "
        "rank 3 gathers layers.2"
    )


UNIT = {"source": Source.FSDP, "role": Role.PARAMETERS}


@pytest.mark.parametrize(
    ("usual", "other"),
    [
        pytest.param(LAYERS, LAYERS, id="equal"),
        pytest.param([call("all_to_all")], [call("all_to_all", sent=0)], id="uneven splits"),
        pytest.param(
            [call("gather", root_rank=1)],
            [call("gather", root_rank=1, nbytes_received=32)],
            id="root of a gather",
        ),
        pytest.param(
            [call("scatter", root_rank=1, nbytes_sent=0)],
            [call("scatter", root_rank=1, nbytes_sent=32)],
            id="root of a scatter",
        ),
        pytest.param(
            [call("broadcast", root_rank=1, nbytes_sent=0)],
            [call("broadcast", root_rank=1, nbytes_received=0)],
            id="root of a broadcast",
        ),
        pytest.param(
            [call("all_gather", sent=4, nbytes_received=24)],
            [call("all_gather", sent=8, nbytes_received=24)],
            id="uneven shards in a list",
        ),
        pytest.param([call("send", peer=1)], [call("recv", peer=3)], id="pipeline transfers"),
        pytest.param([call("send"), *LAYERS], [*LAYERS, call("recv")], id="transfers between"),
        pytest.param([call("unknown:put")], [], id="unknown operation"),
        pytest.param([call("all_reduce", is_unordered=True), *LAYERS], LAYERS, id="another thread"),
        pytest.param(
            [reduce("embed", source=Source.USER)],
            [reduce("head", source=Source.USER)],
            id="tied embedding of two stages",
        ),
        pytest.param(
            [call("all_reduce", "layers.0", role=Role.ACTIVATIONS)],
            [call("all_reduce", "layers.1", role=Role.ACTIVATIONS)],
            id="activations of two modules",
        ),
        pytest.param([gather("0")], [gather(None)], id="unknown owner"),
        pytest.param([gather("0"), gather("")], [gather("@2.0"), gather("@2")], id="second root"),
        pytest.param(
            [gather("0")], [gather("0", phase=Phase.RECOMPUTE, ahead=1)], id="phase and prefetch"
        ),
    ],
)
def test_legitimate_difference_is_not_reported(usual, other):
    assert one_of_four(usual, other) == ""


def test_pipeline_stages_with_separate_groups():
    axis = axis_of("dp", (0, 1))
    stages = [[gather(f"layers.{stage}") for _ in range(2 + stage)] for stage in range(2)]
    assert diverged(stages[0], stages[0], stages[1], stages[1], axes=[axis]) == ""


def test_ranks_outside_a_group_make_no_calls():
    axis = axis_of("size2.stride1", (1, 2))
    inside = [call(axis=axis.name, group_ranks=(1, 2))]
    assert diverged([], inside, inside, [], axes=[axis]) == ""
    assert diverged([], inside, [], [], axes=[axis]) == (
        "ranks diverge at call #1 over size2.stride1 (ranks 1-2): rank 1 calls all_gather, "
        "rank 2 makes no such call"
    )


def test_only_recorded_ranks_are_compared():
    first, _, _, last = recordings(LAYERS, [], [], SWAPPED)
    assert find_divergence_of([first]) is None
    assert "rank 0 gathers layers.1, rank 3 gathers layers.2" in str(
        find_divergence_of([first, last])
    )


def test_equal_groups_are_compared_separately():
    """Two groups of the same ranks, as one per thread; only the second one's calls differ."""
    first, second = gather("0"), gather("0", group_number=2)
    assert one_of_four([first, second], [second, first]) != ""
    assert one_of_four([first, second], [first, replace(second, owner="1")]) == (
        "ranks diverge at call #1 over dp, group 2 of these ranks: rank 1 gathers 1, "
        "ranks 0, 2-3 gather 0"
    )


ACROSS = {"axis": "tp", "kind": "all_reduce"}


def test_two_groups_in_different_orders_form_a_circle():
    axes = (DP, axis_of("world", range(4)))
    dp, world = call(), call("all_reduce", axis="world")
    assert one_of_four([dp, world, dp], [world, dp, dp], axes=axes) == (
        "ranks call several groups in different orders, which can hang on NCCL: rank 0 calls "
        "all_gather #1 over dp before all_reduce #1 over world, rank 1 calls all_reduce #1 over "
        "world before all_gather #1 over dp"
    )


def test_circle_runs_through_four_groups():
    axes = (axis_of("dp", (0, 2)), axis_of("tp", (0, 1)))
    dp, tp = call(), call("all_reduce", axis="tp")
    line = diverged([dp, tp], [tp, dp], [tp, dp], [dp, tp], axes=axes)
    assert line.startswith("ranks call several groups in different orders")
    assert line.count(" before ") == 4


def test_other_order_without_a_circle_is_not_reported():
    """Two stages, each with its own dp and tp groups, in which the order is the other way round."""
    axes = (axis_of("dp", (0, 1)), axis_of("tp", (0, 1)), axis_of("world", range(4)))
    dp, tp, world = call(), call("all_reduce", axis="tp"), call("all_reduce", axis="world")
    first, second = [dp, tp, world], [tp, dp, world]
    assert diverged(first, first, second, second, axes=axes) == ""
    # In a mesh, dp before tp on some ranks is a line, not a circle.
    axes = (axis_of("dp", (0, 2)), axis_of("tp", (0, 1)))
    assert diverged([dp, tp], [dp, tp], [tp, dp], [tp, dp], axes=axes) == ""


def test_transfers_and_threads_form_no_circle():
    axes = (DP, axis_of("world", range(4)))
    dp, world = call(), call("all_reduce", axis="world")
    thread = replace(world, is_unordered=True)
    assert one_of_four([dp, thread], [thread, dp], axes=axes) == ""
    send = call("send", axis="world")
    assert one_of_four([dp, send], [send, dp], axes=axes) == ""


def test_every_kind_is_compared_except_transfers():
    for kind in COLLECTIVE_KINDS:
        is_compared = one_of_four([call(kind)], []) != ""
        assert is_compared == (kind not in {"send", "recv"}), kind
