"""Tests of ``fsdp-comm show`` for each kind of file, and for broken ones."""

import importlib
import io
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
import sample_profiles
from sample_files import TREE, recording

from pytest_fsdp_comm.comm.events import HostWait, Phase, Source
from pytest_fsdp_comm.comm.json import dump_recordings
from pytest_fsdp_comm.comm.profile import GatheredPeak, fold
from pytest_fsdp_comm.command_line.main import main
from pytest_fsdp_comm.snapshots.comm_text import format_profile


def test_show_prints_totals_peak_and_phases(write, fsdp_comm):
    profile = sample_profiles.profile(tensor_parallel=True)
    profile = replace(profile, peaks=(GatheredPeak(nbytes=558_336),), backend="gloo")
    write("a.ws8.comm", format_profile(replace(profile, torch_version="2.13.0")))
    run = fsdp_comm("show", "a.ws8.comm")
    assert run.status == 0
    assert run.lines[:3] == [
        "communication of 8 ranks (torch 2.13.0, gloo)",
        "mesh: dp=4 stride 2, tp=2 stride 1",
        "peak gathered: 545.2 KiB (558_336 B)",
    ]
    # Each of 3 layers gathers twice and reduces once, the root gathers once and reduces once.
    assert re.search(r"^  dp +11  100.0 KiB\n    all_gather +7 +65.0 KiB$", run.out, re.MULTILINE)
    assert re.search(r"^  tp +6 +6.0 KiB$", run.out, re.MULTILINE)
    assert "\nforward\n" in run.out
    assert "\nbackward\n" in run.out
    assert re.search(
        r"^  layers\.\{0\.\.2\} +all_gather\[dp\] x1 of 10_240 B float32 parameters$",
        run.out, re.MULTILINE,
    )  # fmt: skip


def test_show_several_files_prints_a_table(write, fsdp_comm):
    for size in (8, 64):
        profile = sample_profiles.profile(tensor_parallel=size == 64)
        peaks = (GatheredPeak(nbytes=1024 * size),)
        write(f"a.ws{size}.comm", format_profile(replace(profile, world_size=size, peaks=peaks)))
    lines = fsdp_comm("show", "a.ws8.comm", "a.ws64.comm").lines
    table = lines[lines.index("side by side, one rank of each file") + 1 :]
    assert [re.split("  +", line.strip()) for line in table] == [
        ["a.ws8.comm", "a.ws64.comm"],
        ["all_gather[dp] calls", "7", "7"],
        ["reduce_scatter[dp] calls", "4", "4"],
        ["all_gather[tp] calls", "-", "3"],
        ["reduce_scatter[tp] calls", "-", "3"],
        ["bytes on dp", "-", "100.0 KiB"],
        ["bytes on tp", "-", "6.0 KiB"],
        ["bytes in all", "100.0 KiB", "106.0 KiB"],
        ["peak gathered", "8.0 KiB", "64.0 KiB"],
    ]
    # Each file is also printed by itself.
    assert lines[0] == "a.ws8.comm:"
    assert "a.ws64.comm:" in lines


def test_show_sums_up_ranks_that_differ(write, fsdp_comm):
    write("two.json", dump_recordings([recording(0), recording(1, calls=2)]))
    run = fsdp_comm("show", "two.json")
    assert "calls and bytes of all 2 ranks together (they differ)" in run.lines
    assert re.search(r"^  dp +3  24 B$", run.out, re.MULTILINE)
    assert re.search(r"x2 of 8 B float32 ranks 1$", run.out, re.MULTILINE)


def test_show_prints_objects_as_unknown_size(write, fsdp_comm):
    sent = recording(0)
    objects = [replace(event, source=Source.OBJECT) for event in sent.collectives]
    write("objects.json", dump_recordings([replace(sent, collectives=tuple(objects))]))
    out = fsdp_comm("show", "objects.json").out
    assert re.search(r"^  dp +1  1 of unknown size$", out, re.MULTILINE)
    assert " 0 B" not in out


def with_overlap(rank=0, **changes):
    """Return a simulated rank's recording, with one of three calls exposed, and host waits."""
    one = recording(rank, calls=3)
    calls = [replace(call, exposed=call.index == 1, owner="a") for call in one.collectives]
    waits = [
        HostWait(
            index=3 + number, way="item", owner=f"layers.{number // 2}", issued_in=None,
            phase=Phase.FORWARD, call_site="train.py:7",
        )
        for number in range(4)
    ]  # fmt: skip
    facts = {"shows_overlap": True, "collectives": tuple(calls), "host_waits": tuple(waits)}
    return replace(one, **(facts | changes))


def test_host_wait_has_a_short_repr():
    wait = with_overlap().host_waits[0]
    assert repr(wait) == "<HostWait item in forward of layers.0 at train.py:7>"
    assert repr(replace(wait, owner=None, call_site="")) == (
        "<HostWait item in forward of no module>"
    )


def test_show_sums_up_exposed_bytes_and_host_waits(write, fsdp_comm):
    write("one.json", dump_recordings([with_overlap()]))
    lines = fsdp_comm("show", "one.json").lines
    assert "exposed: all_gather[dp] 8 of 24 B" in lines
    assert lines[lines.index("the host waits") + 1] == (
        "  forward  layers.{0..1}  item  x2 each, at train.py:7"
    )
    # A snapshot does not contain lines of code.
    write("one.ws2.comm", format_profile(fold(with_overlap())))
    lines = fsdp_comm("show", "one.ws2.comm").lines
    assert "exposed: all_gather[dp] 8 of 24 B" in lines
    assert lines[lines.index("the host waits") + 1] == "  forward  layers.{0..1}  item  x2 each"


def test_show_host_waits_of_ranks_that_differ(write, fsdp_comm):
    write("two.json", dump_recordings([with_overlap(0, host_waits=()), with_overlap(1)]))
    lines = fsdp_comm("show", "two.json").lines
    # Both ranks have the same calls.
    assert "exposed: all_gather[dp] 8 of 24 B" in lines
    assert "  forward  layers.{0..1}  item  x2 each, on rank 1, at train.py:7" in lines


@pytest.mark.parametrize("changes", [{}, {"shows_overlap": True}])
def test_show_without_exposed_calls_is_silent(write, fsdp_comm, changes):
    write("one.json", dump_recordings([replace(recording(), **changes)]))
    out = fsdp_comm("show", "one.json").out
    assert "exposed" not in out
    assert "host" not in out


def test_show_recording_names_its_rank(write, fsdp_comm):
    write("one.json", dump_recordings([recording(1)]))
    first = fsdp_comm("show", "one.json").lines[0]
    assert first == "communication of 2 ranks, recorded on rank 1 (torch 2.13.0, gloo)"


def test_show_tree_prints_units_and_parameters(write, fsdp_comm):
    write("a.ws4.tree.comm", TREE)
    lines = fsdp_comm("show", "a.ws4.tree.comm").lines
    assert lines[:3] == [
        "sharded model of 4 ranks (torch 2.13.0, gloo)",
        "mesh: dp=4 stride 1",
        # 32 elements of 2 bytes, and 8 of 4 bytes.
        "1 unit; 2 parameters of 40 elements, 96 B",
    ]
    assert lines[-1] == "parameter b.weight float32[8] dp=Shard(0)"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.comm", None, "there is no file a.comm"),
        ("a.comm", b"\xff\xfe\0\0", "a.comm, line 1: it cannot be read as UTF-8 text"),
        ("a.comm", b"# pytest-fsdp-comm 2 tree |\nworld_size x\nend\n", "a.comm, line 2: "),
        ("a.comm", TREE.encode()[:-5], "a.comm, line 7: the file ends with 'total 1 units"),
        ("a.json", b"[1]", "a.json: expected a recording of JSON version 1, got [1]"),
        ("a.json", b"\xff", "a.json cannot be read: "),
        ("a.json", None, "there is no file a.json"),
    ],
)
def test_show_names_the_line_of_a_broken_file(write, fsdp_comm, name, content, problem):
    if content is not None:
        write(name, content)
    run = fsdp_comm("show", name)
    assert (run.status, run.out) == (2, "")
    assert run.err.startswith(f"fsdp-comm: {problem}")
    # The remedy for a failed test does not apply here.
    assert "Nothing was overwritten" not in run.err


def test_show_rejects_a_directory(fsdp_comm):
    assert "is a directory; expected a snapshot" in fsdp_comm("show", ".").err


def test_show_rejects_recordings_of_two_worlds(write, fsdp_comm):
    write("two.json", dump_recordings([recording(0), recording(0)]))
    run = fsdp_comm("show", "two.json")
    assert run.status == 2
    assert (
        "expected one recording per rank, all with the same world size; got ranks 0, 0" in run.err
    )


def test_show_rejects_a_file_without_recordings(write, fsdp_comm):
    write("none.json", dump_recordings([]))
    run = fsdp_comm("show", "none.json")
    assert (run.status, run.err) == (
        2,
        "fsdp-comm: none.json has no recordings; call comm_mode.save(path) after a block\n",
    )


def test_console_script_runs_main():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, name = project["scripts"]["fsdp-comm"].partition(":")
    assert getattr(importlib.import_module(module), name) is main


def test_only_record_keeps_the_encoding_of_its_streams(write, monkeypatch):
    names = [str(write(f"é{number}.comm", TREE)) for number in range(2)]
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert main(["record"]) == 2
    assert (stdout.encoding, stdout.errors) == ("ascii", "strict")
    assert main(["show", *names]) == 0
    assert "é0.comm" in stdout.buffer.getvalue().decode()


def test_program_starts_without_torch_and_pytest(write, project):
    write("a.ws4.tree.comm", TREE)
    code = (
        "import sys; from pytest_fsdp_comm.command_line.main import main;"
        "main(['diff', 'a.ws4.tree.comm', 'a.ws4.tree.comm']); main(['show', 'a.ws4.tree.comm']);"
        "heavy = {'torch', 'pytest', 'syrupy', 'jinja2', 'rich'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(  # noqa: S602  # whoever reads has read enough
        f"{sys.executable} -m pytest_fsdp_comm show a.ws4.tree.comm | true",
        shell=True, cwd=project, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["show", "diff"])
def test_show_escapes_control_characters(write, fsdp_comm, command):
    text = format_profile(sample_profiles.profile(tensor_parallel=True))
    hostile = text.replace("tp=", r"tp\x1b\x0a::error::\u202e=").replace(
        "[tp]", r"[tp\x1b\x0a::error::\u202e]"
    )
    for name, content in (("a.ws8.comm", text), ("b.ws8.comm", hostile)):
        write(name, content)
    files = ["b.ws8.comm"] if command == "show" else ["a.ws8.comm", "b.ws8.comm"]
    run = fsdp_comm(command, *files)
    assert r"tp\x1b\n::error::\u202e" in run.out, run
    assert all(line.isprintable() for line in run.out.split("\n"))
    assert not any(line.startswith("::") for line in run.lines)
