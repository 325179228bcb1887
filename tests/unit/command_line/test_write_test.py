"""Tests of ``fsdp-comm test``: the written test and snapshots, and errors."""

import ast
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from sample_files import TREE, recording

from pytest_fsdp_comm.comm.json import ScriptRun, dump_recordings, join_recordings
from pytest_fsdp_comm.snapshots.names import escape_test_name

WRITTEN = '''"""Guard the communication and the sharding of a training step of train.py."""

from pathlib import Path

import pytest

from pytest_fsdp_comm import record_script


@pytest.mark.distributed(world_size={size}, simulate=True, ranks=[0])
def test_train(comm_mode, fsdp_tree, comm_snapshot):
    model = record_script(
        comm_mode,
        str(Path(__file__).parent / "train.py"),
        "--lr",
        "0.1",
        step=4,
    )
    assert {{"comm": comm_mode, "tree": fsdp_tree(model)}} == comm_snapshot
'''


@pytest.fixture
def recorded(write):
    def write_all(script="train.py", *, is_module=False, last=4, hosts_of=None):
        run = ScriptRun(
            script=script,
            arguments=("--lr", "0.1"),
            is_module=is_module,
            first_step=4,
            last_step=last,
            local_world_size=hosts_of,
        )
        write("step.json", join_recordings({0: dump_recordings([recording(0)])}, run))
        write("step.tree.comm", TREE)
        if not is_module:
            write(script, "")

    return write_all


def test_model_that_is_not_sharded_has_no_tree(recorded, write, fsdp_comm, project):
    """Its tree would be refused: nothing in it is sharded."""
    recorded()
    lines = [line for line in TREE.splitlines() if not line.startswith("unit ")]
    lines = [
        f"{line.partition('] ')[0]}] unmanaged" if line.startswith("parameter ") else line
        for line in lines
    ]
    number = sum(line.startswith("parameter ") for line in lines)
    lines[-2] = f"total 0 units, {number} parameters"
    write("step.tree.comm", "\n".join(lines) + "\n")
    done = fsdp_comm("test", "step.json")
    assert (done.status, done.err) == (0, "")
    source = (project / "test_train.py").read_text()
    assert "def test_train(comm_mode, comm_snapshot):\n    record_script(\n" in source
    assert "    assert comm_mode == comm_snapshot\n" in source
    (file,) = (project / "snapshots" / "test_train").iterdir()
    assert file.name == f"test_train.ws{recording(0).world_size}.comm"


def test_written_test_runs_the_script_by_path(recorded, fsdp_comm, project):
    recorded()
    done = fsdp_comm("test", "step.json")
    assert (done.status, done.err) == (0, "")
    assert done.lines == [
        "wrote test_train.py and snapshots/test_train: review both, then run pytest test_train.py"
    ]
    size = recording(0).world_size
    assert (project / "test_train.py").read_text() == WRITTEN.format(size=size)
    names = {file.name for file in (project / "snapshots" / "test_train").iterdir()}
    assert names == {f"test_train.ws{size}.comm", f"test_train.ws{size}.tree.comm"}
    again = fsdp_comm("test", "step.json")
    assert again.status == 2
    assert again.err == (
        "fsdp-comm: test_train.py already exists: to accept a new recording, run pytest "
        "--snapshot-update test_train.py; to write a new test, remove the file, or choose another "
        "test file with -o\n"
    )


def test_written_test_has_hosts_of_the_recording(recorded, fsdp_comm, project):
    recorded(hosts_of=2)
    assert fsdp_comm("test", "step.json").status == 0
    assert """def test_train(monkeypatch, comm_mode, fsdp_tree, comm_snapshot):
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    model = record_script(
""" in (project / "test_train.py").read_text()


def test_page_shows_the_written_test(write, fsdp_comm, project):
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "record.md").read_text()
    (code,) = re.findall(r"(?ms)^```python no-run\n(.*?)^```$", page)
    run = ScriptRun(
        script="train.py", arguments=("--lr", "0.1"), is_module=False, first_step=3, last_step=3
    )
    ranks = {rank: dump_recordings([recording_of_4(rank)]) for rank in range(4)}
    write("step.json", join_recordings(ranks, run))
    write("step.tree.comm", TREE)
    write("train.py", "")
    assert fsdp_comm("test", "step.json").status == 0
    assert (project / "test_train.py").read_text() == code


def recording_of_4(rank):
    return replace(recording(rank), world_size=4)


@pytest.mark.parametrize(
    ("script", "line"),
    [
        ("train.py", 'str(Path(__file__).parent / "../train.py"),'),
        ("pkg.train", '"pkg.train",'),
    ],
)
def test_written_test_elsewhere_finds_its_script(recorded, fsdp_comm, project, script, line):
    is_module = ".py" not in script
    recorded(script, is_module=is_module)
    assert fsdp_comm("test", "step.json", "-o", "tests/test_it.py").status == 0
    written = (project / "tests" / "test_it.py").read_text()
    assert line in {text.strip() for text in written.splitlines()}
    assert ("is_module=True" in written) == is_module
    compile(written, "test_it.py", "exec")


@pytest.mark.parametrize(
    ("settings", "place", "is_collected"),
    [
        ("testpaths = tests", "tests/test_train.py", True),
        ("testpaths = test_*.py unit* docs", "unit_tests/test_train.py", True),
        ("testpaths = new", "new/test_train.py", True),
        ("testpaths = . tests", "test_train.py", True),
        ("testpaths = none-*", "test_train.py", True),
        ("testpaths = tests", "own/test_train.py", False),
        ("", "tests/own.py", False),
        ("python_files = check_*.py", "test_train.py", False),
        ("python_files = *.py\ntestpaths = tests", "tests/own.py", True),
    ],
)
def test_default_output_is_where_pytest_collects(
    recorded, write, fsdp_comm, *, project, settings, place, is_collected
):
    recorded()
    for file in ("tests/test_a.py", "unit_tests/test_a.py", "test_a.py"):
        write(file, "")
    write("pytest.ini", f"[pytest]\n{settings}\n")
    output = ["-o", place] if "own" in place else []
    done = fsdp_comm("test", "step.json", *output)
    folder = f"snapshots/{place.removesuffix('.py')}"
    first, *more = done.lines
    assert first == f"wrote {place} and {folder}: review both, then run pytest {place}"
    warning = "pytest without arguments does not run it: see testpaths and python_files"
    assert more == ([] if is_collected else [warning])
    assert (project / place).is_file()
    assert (project / folder).is_dir()


@pytest.mark.parametrize("start", ["", "part", "other"])
def test_recording_elsewhere_keeps_its_project(
    recorded, write, fsdp_comm, *, project, monkeypatch, start
):
    for file in ("step.json", "step.tree.comm", "src/train.py"):
        recorded("src/train.py")
        write(f"part/{file}", (project / file).read_bytes())
        (project / file).unlink()
    write("part/pyproject.toml", '[tool.pytest]\ntestpaths = ["tests"]')
    write("other/train.py", "")
    monkeypatch.chdir(project / start)
    recording = os.path.relpath(project / "part" / "step.json")
    written = os.path.relpath(project / "part" / "tests" / "test_train.py")
    assert f"then run pytest {written}\n" in fsdp_comm("test", recording).out
    text = (project / "part" / "tests" / "test_train.py").read_text()
    assert '"../src/train.py"' in text
    assert (project / "part" / "snapshots" / "tests" / "test_train").is_dir()


@pytest.mark.parametrize(
    ("script", "name"),
    [
        ("train model.py", "train_model"),
        ("train+v2.py", "train_v2"),
        ("a{b}.py", "a_b_"),
        ("a.b-c.py", "a_b_c"),
        ('it\'s """"mine\\.py', "it_s_____mine_"),
        ("2 ﬁt-überall☃.py", "2_fit_überall_"),
        (os.fsdecode(b"caf\xe9.py"), "caf_"),
        ("a\x1b\n.py", "a__"),
    ],
)
def test_written_test_compiles_for_any_script(recorded, fsdp_comm, project, script, name):
    """It names a function, a file and snapshots that pytest finds again."""
    recorded(script)
    done = fsdp_comm("test", "step.json")
    assert (done.status, done.err) == (0, "")
    path = project / f"test_{name}.py"
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert [node.name for node in tree.body if isinstance(node, ast.FunctionDef)] == [path.stem]
    assert [
        *(project / "snapshots" / path.stem).glob(f"{escape_test_name(path.stem)}.ws*.tree.comm")
    ]
    literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert script in literals
    assert ast.get_docstring(tree).startswith("Guard the communication and the sharding of a tr")


def test_arguments_are_written_as_they_are(recorded, write, fsdp_comm, project):
    arguments = ["😀", 'a"b\\', "\x1b", os.fsdecode(b"\xe9"), "\u2028"]
    recorded()
    run = ScriptRun(
        script="train.py", arguments=tuple(arguments), is_module=False, first_step=4, last_step=4
    )
    write("step.json", join_recordings({0: dump_recordings([recording(0)])}, run))
    assert fsdp_comm("test", "step.json").status == 0
    tree = ast.parse((project / "test_train.py").read_text(encoding="utf-8"))
    literals = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert [value for value in literals if value in arguments] == arguments


def test_modules_of_one_package_have_own_tests(recorded, fsdp_comm, project):
    for module in ("pkg.train", "pkg.eval"):
        recorded(module, is_module=True)
        assert fsdp_comm("test", "step.json").status == 0
    assert {file.name for file in project.glob("test_*")} == {
        "test_pkg_train.py",
        "test_pkg_eval.py",
    }


def test_missing_script_is_named(recorded, fsdp_comm, project):
    recorded()
    (project / "train.py").unlink()
    done = fsdp_comm("test", "step.json")
    assert done.status == 2
    assert "step.json was recorded from train.py, which was not found; run" in done.err


@pytest.mark.parametrize("file", ["pyproject.toml", "setup.py", ""])
def test_snapshots_without_settings_are_in_rootdir(
    recorded, write, fsdp_comm, *, project, monkeypatch, file
):
    (project / "pytest.ini").unlink()
    recorded()
    if file:
        write(file, "")
    (project / "part").mkdir()
    # Without a configuration file, pytest's root directory is the working directory.
    monkeypatch.chdir(project / ("part" if file else ""))
    recording, test = (os.path.relpath(project / name) for name in ("step.json", "part/test_it.py"))
    assert fsdp_comm("test", recording, "-o", test).status == 0
    assert (project / "snapshots" / "part" / "test_it").is_dir()


def test_recording_without_one_step_is_refused(recorded, write, fsdp_comm, project):
    def refused(name="step.json"):
        done = fsdp_comm("test", name)
        assert done.status == 2
        return done.err

    recorded(last=5)
    assert (
        "step.json: expected the recording of one step of a script, with step.tree.comm"
        in refused()
    )
    (project / "step.tree.comm").unlink()
    assert "expected the recording of one step of a script" in refused()
    write("own.json", dump_recordings([recording(0)]))
    assert "own.json: expected the recording of one step of a script" in refused("own.json")
