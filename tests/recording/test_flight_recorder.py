"""The flight recorder's dumps, made by hand: gloo's, and NCCL's with its own states."""

import pytest

from pytest_fsdp_comm.recording import flight_recorder
from pytest_fsdp_comm.recording.flight_recorder import Witness, parse_flights, read_flights


def entry(seq, *, backend, state, retired=False, is_p2p=False, at=100, kind="all_reduce"):
    return {
        "collective_seq_id": seq,
        "input_dtypes": ["Float"],
        "input_sizes": [[4]],
        "is_p2p": is_p2p,
        "output_dtypes": ["Float"],
        "output_sizes": [[4]],
        "process_group": ("0", "default_pg"),
        "profiling_name": f"{backend}:{kind}",
        "retired": retired,
        "state": state,
        "thread_id": "7",
        "time_created_ns": at,
        "timeout_ms": 600_000,
    }


@pytest.mark.parametrize(
    ("backend", "state", "retired", "is_done"),
    [
        ("gloo", "scheduled", False, False),
        ("gloo", "scheduled", True, True),
        ("nccl", "scheduled", False, False),
        ("nccl", "started", False, False),
        ("nccl", "completed", False, True),
        ("nccl", "completed", True, True),
    ],
)
def test_flight_is_done_if_retired_or_completed(backend, state, retired, is_done):
    (found,) = parse_flights([entry(7, backend=backend, state=state, retired=retired)])
    assert (found.kind, found.seq, found.nbytes, found.is_done) == ("all_reduce", 7, 16, is_done)


def test_flights_skip_earlier_and_point_to_point_calls(monkeypatch):
    old = entry(1, backend="nccl", state="started", at=99)
    sent = entry(2, backend="nccl", state="started", is_p2p=True)
    new = entry(3, backend="nccl", state="started")
    of_nccl = {"_dump_nccl_trace": [old, sent, new]}
    monkeypatch.setattr(flight_recorder, "_read_entries", lambda dump: of_nccl.get(dump, []))
    assert [found.seq for found in read_flights(since_ns=100)[0]] == [3]


@pytest.mark.parametrize(
    ("listed", "kind"),
    [
        ("_all_gather_base", "all_gather"),
        ("_reduce_scatter_base", "reduce_scatter"),
        ("all_to_all", "all_to_all"),
    ],
)
def test_kinds_of_nccl_have_the_recordings_names(listed, kind):
    (found,) = parse_flights([entry(1, backend="nccl", state="started", kind=listed)])
    assert found.kind == kind


def test_gap_names_the_kind_that_nccl_ran(monkeypatch):
    """Matching with gloo's entries treats a reduce-scatter as an all-reduce; the text must not."""
    unseen = entry(1, backend="nccl", state="started", kind="_reduce_scatter_base")
    unseen["record_id"] = 0
    monkeypatch.setattr(flight_recorder, "_read_entries", lambda dump: [unseen] * ("nccl" in dump))
    monkeypatch.setattr("time.time_ns", lambda: 0)
    witness = Witness()
    witness.find_unseen([])
    (gap,) = witness.make_gaps(dict)
    assert gap.text.endswith(": reduce_scatter of 16 B float32 over default_pg")
