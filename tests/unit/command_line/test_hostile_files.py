"""Names in a fork's files run no commands of CI, and no control sequences of a terminal."""

import re
from dataclasses import replace

import pytest
import sample_profiles
from sample_files import TREE

from pytest_fsdp_comm.snapshots.comm_text import format_profile
from pytest_fsdp_comm.text.fqn import escape

NAMES = [
    "::stop-commands::x",
    "##[error]x",
    *(
        pytest.param(name, marks=pytest.mark.costly)
        for name in ("\r::error::x", "x\x1b[31m\n ::error::", "##vso[x]")
    ),
]


def commands(text):
    """Return all lines that GitHub or Azure would run, and all control characters."""
    # The runner removes spaces before it looks for "::".
    lines = [line for line in re.split("[\r\n]", text) if line.strip().startswith("::")]
    return lines + re.findall(r"##\w*\[|[^\n -\U0010ffff]", text)


def comm_text(name, layers):
    profile = sample_profiles.profile(layers=layers, name=name)
    axis = replace(sample_profiles.DP, name=name)
    rows = tuple(replace(row, axis=name if row.axis == "dp" else row.axis) for row in profile.rows)
    axes = tuple(axis if old.name == "dp" else old for old in profile.mesh_axes)
    return format_profile(replace(profile, rows=rows, mesh_axes=axes))


def tree_text(name, frozen=""):
    text = re.sub(r"\bdp\b|a.weight", lambda _: escape(name), TREE)
    text = text.replace("world_size 4", "world_size 8").replace("=4 stride 1", "=8 stride 1")
    return text.replace("b.weight float32[8] ", f"~ float32[8] {frozen}")


@pytest.fixture(params=NAMES)
def name(request, write):
    """Write artifacts that name files, modules, parameters and axes like this."""
    name = request.param
    for directory in ("", f"{name}/", "test_a/"):
        file = name if directory != "test_a/" else "test_x"
        path = f"{directory}{file}.ws8"
        write(f"snapshots/{path}.comm", comm_text(name, 3))
        write(f"snapshots/{path}.tree.comm", tree_text(name))
        for side, layers, frozen in (("expected", 3, ""), ("received", 4, "frozen ")):
            write(f"ci/{side}/{path}.comm", comm_text(name, layers))
            write(f"ci/{side}/{path}.tree.comm", tree_text(name, frozen))
        write(f"ci/received/{path}.added.comm", comm_text(name, 2))
        write(f"ci/received/{path}.broken.comm", f"{name}\n##[x]\n")
        write(f"ci/received/{path}.changed.comm", comm_text(name, 2))
        write(f"snapshots/{path}.changed.comm", comm_text(name, 5))
    return name


@pytest.mark.usefixtures("name")
@pytest.mark.parametrize("lines", [[], ["--lines"]])
def test_diff_prints_no_commands(fsdp_comm, lines):
    done = fsdp_comm("diff", *lines, "ci/expected", "ci/received")
    assert done.status == 2  # broken files
    assert len(done.lines) > 20
    assert commands(done.out + done.err) == []


def test_accept_prints_no_commands(name, fsdp_comm):
    done = fsdp_comm("accept", "ci")
    assert done.status == 2
    assert done.lines[-1] == "9 files accepted, 6 refused", done.err
    assert commands(done.out + done.err) == []
    assert commands(fsdp_comm("accept", f"ci/{name}").err) == []


def test_show_prints_no_commands(name, fsdp_comm, project, monkeypatch):
    monkeypatch.chdir(project / "ci/received" / name)
    for files in ([f"{name}.ws8.comm"], [f"{name}.ws8.comm", f"{name}.ws8.tree.comm"]):
        done = fsdp_comm("show", *files, *files[:1])
        assert (done.status, done.err) == (0, "")
        assert commands(done.out) == []
    assert commands(fsdp_comm("show", f"{name}.ws8.broken.comm").err) == []
    assert commands(fsdp_comm("show", f"{name}.json").err) == []


def test_git_diff_prints_no_commands(name, fsdp_comm):
    for file in ("comm", "tree.comm", "broken.comm"):
        new = f"ci/received/{name}.ws8.{file}"
        old = new.replace("received", "expected") if "broken" not in file else "/dev/null"
        for renamed in ([], [f"{name}/new.comm", "header"]):
            path = f"{name}.ws8.{file}"
            done = fsdp_comm("git-diff", path, old, "0", "100644", new, "1", "100644", *renamed)
            assert done.status == 0
            assert len(done.lines) > 3
            assert commands(done.out + done.err) == []
    assert commands(fsdp_comm("git-diff", name).out) == []
