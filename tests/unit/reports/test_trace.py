"""Traces: their form, what pairs, and that nothing of one thread overlaps."""

import json
from collections import Counter, defaultdict
from dataclasses import replace

import pytest
from sample_files import recording

from pytest_fsdp_comm.comm.events import Phase, Reshard
from pytest_fsdp_comm.reports.trace import dump_trace, gathered_spans

NUMBER, WORD = {"type": "integer", "minimum": 0}, {"type": "string", "minLength": 1}


def event(phase, **fields):
    required = ["ph", "name", "pid", *(name for name in fields if name not in {"args", "tid"})]
    return {
        "type": "object",
        "properties": {
            "ph": {"const": phase},
            "name": WORD,
            "pid": NUMBER,
            "tid": NUMBER,
            **fields,
        },
        "required": required,
    }


SCHEMA = {
    "type": "object",
    "required": ["traceEvents"],
    "properties": {
        "displayTimeUnit": {"enum": ["ms", "ns"]},
        "traceEvents": {
            "type": "array",
            "items": {
                "oneOf": [
                    event("M", args={"type": "object", "minProperties": 1}),
                    event("X", ts=NUMBER, dur={"type": "integer", "exclusiveMinimum": 0}, cat=WORD),
                    event("b", ts=NUMBER, id=WORD, cat=WORD),
                    event("e", ts=NUMBER, id=WORD, cat=WORD),
                    event("C", ts=NUMBER, args={"additionalProperties": NUMBER}),
                ]
            },
        },
    },
}


def reshard(index, action, module, nbytes=8, phase=Phase.FORWARD):
    return Reshard(
        index=index, action=action, module=module, issued_in=None, phase=phase, nbytes=nbytes
    )


def stepped(rank=0):
    """Two collectives among unshards that overlap, one gathered before and one beyond the block."""
    first = recording(rank).collectives[0]
    return replace(
        recording(rank),
        collectives=(
            replace(first, index=2, owner=""),
            replace(first, index=5, axis="tp", kind="all_reduce", phase=Phase.BACKWARD, owner=None),
        ),
        reshards=(
            reshard(0, "reshard", "before", 3),
            reshard(1, "unshard", "a", 10),
            reshard(3, "unshard", "b", 20),
            reshard(4, "reshard", "a", 10),
            reshard(6, "unshard", "b", 20),
        ),
    )


def events(*recordings):
    return json.loads(dump_trace(recordings))["traceEvents"]


def test_a_trace_matches_the_schema_of_trace_events():
    jsonschema = pytest.importorskip("jsonschema")
    document = json.loads(dump_trace([stepped(0), stepped(1)]))
    jsonschema.validate(document, SCHEMA)
    for broken in ("ph", "ts", "name"):
        changed = json.loads(json.dumps(document))
        changed["traceEvents"][-1].pop(broken)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(changed, SCHEMA)


def test_ranks_are_processes_and_axes_their_threads():
    names = {
        (one["pid"], one.get("tid")): one["args"]["name"]
        for one in events(stepped(0), stepped(3))
        if one["name"] in {"process_name", "thread_name"} and one["args"]["name"] != "phases"
    }
    assert names[0, 1] == "dp (2 stride 1)"
    assert names[3, 2] == "tp"
    assert names[3, 0] == "rank 3 of 2"


def test_a_collective_says_what_it_is_and_leaves_out_what_is_not_known():
    (one,) = [one for one in events(stepped()) if one["name"] == "all_gather (root)"]
    assert (one["ts"], one["dur"], one["cat"], one["tid"]) == (3_000, 800, "forward", 1)
    assert one["args"] == {
        "phase": "forward",
        "owner": "(root)",
        "issued in": "a",
        "bytes": 8,
        "dtype": "float32",
        "ranks of the group": 2,
        "by": "fsdp",
        "at": "train.py:3",
    }
    assert any(one["name"] == "all_reduce (no-module)" for one in events(stepped()))


def test_phases_come_in_their_order():
    spans = [
        (one["name"], one["ts"], one["ts"] + one["dur"])
        for one in events(stepped())
        if one.get("cat") == "phase"
    ]
    # The last unshard is of the forward, after a collective of the backward.
    assert spans == [
        ("forward", 1_000, 5_800),
        ("backward", 6_000, 6_800),
        ("forward", 7_000, 7_800),
    ]


def test_unshards_pair_with_reshards_and_count_what_is_gathered():
    spans = gathered_spans(stepped().reshards, end=7)
    # Gathered before the block; gathered twice over; never freed.
    assert spans == [(-1, 0, "before", 3), (1, 4, "a", 10), (3, 7, "b", 20)]
    held = [(one["ts"], one["args"]["bytes"]) for one in events(stepped()) if one["ph"] == "C"]
    assert held == [(0, 3), (1_000, 0), (2_000, 10), (4_000, 30), (5_000, 20), (8_000, 0)]


def check_pairs_and_overlaps(found):
    """What a schema cannot say."""
    open_spans, ended = Counter(), defaultdict(int)
    for one in found:
        if one["ph"] in {"b", "e"}:
            key = (one["cat"], one["id"], one["name"])
            open_spans[key] += 1 if one["ph"] == "b" else -1
            assert open_spans[key] in {0, 1}, one
        if one["ph"] == "X":
            thread = (one["pid"], one["tid"])
            assert one["ts"] >= ended[thread], one
            ended[thread] = one["ts"] + one["dur"]
    assert not any(open_spans.values())
    times = [one["ts"] for one in found if "ts" in one]
    per_rank = Counter(one["pid"] for one in found)
    assert len(per_rank) > 1 or times == sorted(times)


def test_spans_of_a_thread_do_not_overlap_and_each_async_span_ends_once():
    check_pairs_and_overlaps(events(stepped()))
    check_pairs_and_overlaps(events(stepped(0), stepped(1)))
    found = events(stepped())
    broken = [one for one in found if one["ph"] != "e"]
    with pytest.raises(AssertionError):
        check_pairs_and_overlaps(broken)


def test_a_recording_of_nothing_is_an_empty_trace():
    empty = replace(recording(), collectives=())
    assert {one["ph"] for one in events(empty)} == {"M"}
