"""Causes of rows that no step explains: options of DDP, schedules of pipelines, lost backwards."""

import pytest
from sample_profiles import BACKWARD, FORWARD, counted, made, row

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Phase
from pytest_fsdp_comm.reports.changes import render_comparison

OUTSIDE = Phase.OUTSIDE
BUCKET = row(BACKWARD, "", "all_reduce", 4_096, "gradients", axis="world")
BUFFERS = row(FORWARD, "", "broadcast", 512, "buffers", axis="world")
MAP = row(BACKWARD, "head", "all_reduce", 40, "unused parameters", axis="world")
BROADCAST = row(OUTSIDE, None, "broadcast", 512, axis="world")
LOOKS = "looks for unused parameters (find_unused_parameters)"
BROADCASTS = "broadcasts buffers (broadcast_buffers, or the model's buffers)"


def told(old, new):
    failure = render_comparison(compare(made(old), made(new)), snapshot="s")
    return [line.strip() for line in failure.body]


def likely(old, new):
    mark = "likely: "
    return [line.removeprefix(mark) for line in told(old, new) if line.startswith(mark)]


@pytest.mark.parametrize(("option", "text"), [(MAP, LOOKS), (BUFFERS, BROADCASTS)])
def test_option_of_ddp_is_named_second(option, text):
    assert told([BUCKET], [BUCKET, option])[1] == f"likely: DDP now {text}"
    assert told([BUCKET, option], [BUCKET])[1] == f"likely: DDP no longer {text}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        # Another broadcast, DDP itself, or no backward is another change.
        ([BUCKET, BUFFERS], [BUCKET, BUFFERS, BROADCAST]),
        ([BROADCAST], [BUCKET, BUFFERS, BROADCAST]),
        ([BUCKET, BUFFERS], [BUFFERS]),
    ],
)
def test_other_changes_are_no_option_of_ddp(old, new):
    assert not any("DDP" in text for text in likely(old, new))


def stage(forwards, backwards, sends=4):
    """Rows of two units in a pipeline; the second is gathered once more in forward."""
    rows = []
    for number, more in enumerate((0, 1)):
        for phase, count in ((FORWARD, forwards + more), (BACKWARD, backwards)):
            owner = f"layers.{number}"
            rows.append(row(phase, owner, "all_gather", 1_024, "parameters", count=count))
            rows.append(counted("reshard", phase, owner, "unshard", count))
    return [*rows, row(OUTSIDE, None, "send", 256, axis="world", count=sends)]


SCHEDULE = "another pipeline schedule, which runs micro-batches in a different order"


def test_units_gathered_at_other_times_mean_another_schedule():
    assert likely(stage(5, 1), stage(3, 3)) == [SCHEDULE]
    assert likely(stage(3, 3), stage(5, 1)) == [SCHEDULE]


@pytest.mark.parametrize(
    "new",
    [
        stage(3, 3, sends=8),  # other micro-batches or stages
        stage(7, 3),  # more of both
        stage(3, 3)[:-1],  # no pipeline any more
    ],
)
def test_other_changes_are_no_schedule(new):
    assert SCHEDULE not in likely(stage(5, 1), new)


GATHERED = row(OUTSIDE, None, "all_gather", 1_024)
BACK = row(BACKWARD, None, "reduce_scatter", 1_024)
DETACHED = (
    "gradients no longer pass through a collective of forward: detach(), or a call without "
    "gradients"
)


def test_lost_backward_of_a_collective_is_explained():
    assert told([BUCKET, GATHERED, BACK], [BUCKET, GATHERED])[1] == f"likely: {DETACHED}"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ([BUCKET, GATHERED, BACK], [BUCKET]),  # the forward collective is gone, too
        ([BUCKET, GATHERED], [BUCKET, GATHERED, BACK]),
        (
            [BUCKET, GATHERED, BACK],
            [BUCKET, GATHERED, row(BACKWARD, None, "reduce_scatter", 2_048)],
        ),
        (
            [BUCKET, GATHERED, BACK],
            [BUCKET, GATHERED, row(BACKWARD, None, "all_reduce", 1_024)],
        ),
    ],
)
def test_other_changes_lose_no_backward(old, new):
    assert DETACHED not in likely(old, new)


def test_gradients_alone_may_be_reduced_twice():
    twice = row(BACKWARD, "", "all_reduce", 4_096, "gradients", axis="world", count=2)
    other = row(BACKWARD, "head", "all_reduce", 64, "gradients", axis="world")
    others = row(BACKWARD, "head", "all_reduce", 64, "gradients", axis="world", count=2)
    again = ", or each gradient is reduced 2 times"
    assert any(text.endswith(again) for text in likely([BUCKET, other], [twice, others]))
    # Calls of forward show how many steps ran.
    metric = row(FORWARD, None, "all_gather", 64)
    metrics = row(FORWARD, None, "all_gather", 64, count=2)
    old, new = [BUCKET, other, metric], [twice, others, metrics]
    assert not any(again in text for text in likely(old, new))


def test_objects_have_no_bytes_in_a_sentence():
    reduced = row(OUTSIDE, None, "all_reduce", 4)
    gathered = row(OUTSIDE, None, "all_gather", 0, count=2)
    line = "all_gather instead of all_reduce over dp outside forward and backward"
    assert told([BUCKET, reduced], [BUCKET, gathered])[0] == line
    sized = row(OUTSIDE, None, "all_gather", 16)
    assert told([BUCKET, reduced], [BUCKET, sized])[0] == f"{line}, 4 -> 16 B"


def test_gradients_gathered_by_an_optimizer_are_not_reduced():
    unit = [row(FORWARD, "layers.0", "all_gather", 1_024, "parameters")]
    unit += [row(BACKWARD, "layers.0", "reduce_scatter", 1_024, "gradients")]
    muon = row(OUTSIDE, "layers.0", "all_gather", 1_024, "gradients")
    lines = told([*unit, muon], unit)
    assert lines[0] == "gradients of layers.0 no longer sent by all_gather[dp]"
    assert not any("breaks training" in line for line in lines)
