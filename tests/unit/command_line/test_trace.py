"""``fsdp-comm trace`` puts recordings of several ranks into one file."""

import json

from sample_files import recording

from pytest_fsdp_comm.comm.json import dump_recordings


def test_recordings_of_several_ranks_become_one_trace(write, fsdp_comm, project):
    write("1.json", dump_recordings([recording(1)]))
    write("0.json", dump_recordings([recording(0)]))
    made = fsdp_comm("trace", "1.json", "0.json")
    assert (made.status, made.lines) == (0, ["1.trace.json: open it at https://ui.perfetto.dev"])
    trace = json.loads((project / "1.trace.json").read_text())
    assert [one["pid"] for one in trace["traceEvents"] if one["name"] == "process_name"] == [0, 1]
    write("both.json", dump_recordings([recording(0), recording(1)]))
    assert fsdp_comm("trace", "both.json", "-o", "t.json").status == 0
    assert json.loads((project / "t.json").read_text()) == trace


def test_what_is_no_recording_or_of_one_rank_twice_is_an_error(write, fsdp_comm, project):
    write("a.json", dump_recordings([recording(1)]))
    twice = fsdp_comm("trace", "a.json", "a.json")
    assert twice.status == 2
    assert "a.json, a.json: expected recordings of different ranks" in twice.err
    write("b.comm", "x")
    assert "b.comm: expected a recording as JSON" in fsdp_comm("trace", "b.comm").err
    assert "cannot write nowhere/t.json" in fsdp_comm("trace", "a.json", "-o", "nowhere/t.json").err
    assert not list(project.glob("*.trace.json"))
