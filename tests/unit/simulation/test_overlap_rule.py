"""The rule of `simulation/overlap.py`, against paths in an explicit graph of the same schedule."""

import random
from collections import defaultdict

import pytest

from pytest_fsdp_comm.simulation.overlap import Timeline
from pytest_fsdp_comm.simulation.streams import SimulatedStream

STREAMS = "main", "side", "third"
COMMUNICATORS = "dp", "tp"


class Graph:
    """The same calls as `Timeline`; an edge leads to everything that has to wait."""

    def __init__(self):
        self.earlier = []
        self.last = {}
        self.last_of_communicator = {}
        self.host = []
        self.works = {}

    def add(self, stream, *after):
        last = [self.last[stream]] if stream in self.last else []
        self.earlier.append({*after, *self.host, *last})
        self.last[stream] = len(self.earlier) - 1
        return self.last[stream]

    def compute(self, stream, work):
        self.works[work] = self.add(stream)

    def communicate(self, stream, communicator):
        last = self.last_of_communicator.get(communicator)
        node = self.add(stream, *([] if last is None else [last]))
        self.last_of_communicator[communicator] = node
        return node

    def record(self, stream):
        return self.add(stream)

    def wait(self, stream, event):
        self.add(stream, event)

    def wait_on_host(self, event):
        self.host.append(event)

    def before(self):
        """Return the nodes before each node; nodes are numbered in the order of issue."""
        closed = []
        for earlier in self.earlier:
            closed.append(earlier.union(*(closed[node] for node in earlier)))
        return closed

    def beside(self, node):
        before = self.before()
        return {
            work
            for work, other in self.works.items()
            if other not in before[node] and node not in before[other]
        }


class Both:
    """Passes each call to the rule and to the graph."""

    def __init__(self):
        self.sides = Timeline(), Graph()

    def call(self, name, *args):
        return tuple(getattr(side, name)(*args) for side in self.sides)

    def communicate(self, stream, communicator, *, is_async):
        if is_async:
            self.wait(communicator, self.call("record", stream))
            stream = communicator
        return self.call("communicate", stream, communicator)

    def wait(self, stream, event):
        """Make a stream wait for an event, or the host if `stream` is None."""
        for side, of_side in zip(self.sides, event, strict=True):
            side.wait_on_host(of_side) if stream is None else side.wait(stream, of_side)


def run_at_random(seed):
    """Return the pairs of what the rule and the graph find beside each collective."""
    draw = random.Random(seed)  # noqa: S311  # not for security
    both, events, collectives = Both(), [], []
    for number in range(draw.randint(5, 45)):
        stream = draw.choice(STREAMS)
        action = draw.choice(["compute"] * 4 + ["sync", "async", "record", "wait", "end", "host"])
        if action == "compute":
            both.call("compute", stream, number)
        elif action in {"sync", "async"}:
            communicator = draw.choice(COMMUNICATORS)
            is_async = action == "async"
            collectives.append(both.communicate(stream, communicator, is_async=is_async))
        elif action == "record":
            events.append(both.call("record", stream))
        elif action == "end" and collectives:
            place, node = draw.choice(collectives)
            events.append((place.end, node))
        elif action in {"wait", "host"} and events:
            both.wait(stream if action == "wait" else None, draw.choice(events))
    timeline, graph = both.sides
    return [({*timeline.work_beside(place)}, graph.beside(node)) for place, node in collectives]


def test_rule_agrees_with_paths_in_a_graph():
    counts = defaultdict(int)
    for seed in range(3_000):
        for rule, paths in run_at_random(seed):
            assert rule == paths, seed
            counts[bool(paths)] += 1
    assert counts[True] > 10_000
    assert counts[False] > 300


@pytest.fixture
def timeline():
    return Timeline()


def test_collective_on_its_own_stream_is_exposed(timeline):
    timeline.compute("main", "before")
    place = timeline.communicate("main", "dp")
    timeline.compute("main", "after")
    assert [*timeline.work_beside(place)] == []


def test_side_stream_hides_between_its_waits(timeline):
    timeline.compute("main", "before")
    timeline.wait("side", timeline.record("main"))
    timeline.compute("main", "first")
    place = timeline.communicate("side", "dp")
    timeline.compute("main", "second")
    timeline.wait("main", place.end)
    timeline.compute("main", "after")
    assert [*timeline.work_beside(place)] == ["first", "second"]


def test_host_wait_before_issue_exposes(timeline):
    timeline.compute("main", "before")
    timeline.wait_on_host(timeline.record("main"))
    place = timeline.communicate("side", "dp")
    timeline.wait("main", place.end)
    assert [*timeline.work_beside(place)] == []


def test_host_wait_for_everything_orders_new_streams(timeline):
    timeline.compute("main", "before")
    timeline.compute("side", "beside")
    timeline.wait_on_host(timeline.record_all())
    place = timeline.communicate("new", "dp")
    timeline.compute("main", "after")
    assert [*timeline.work_beside(place)] == ["after"]


def test_one_communicator_runs_calls_in_order(timeline):
    first = timeline.communicate("side", "dp")
    timeline.compute("main", "work")
    second = timeline.communicate("third", "dp")
    timeline.wait("main", second.end)
    timeline.compute("main", "after")
    assert [*timeline.work_beside(first)] == ["work"]
    assert timeline.communicate("fourth", "tp").clock == {}


def test_simulated_streams_have_numbers():
    assert len({SimulatedStream().stream_id for _ in range(3)}) == 3
