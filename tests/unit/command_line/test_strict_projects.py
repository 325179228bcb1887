"""Commands in projects with strict settings, and in directories with unusual names."""

import os

import pytest
import sample_profiles
from sample_files import TREE, recording

from pytest_fsdp_comm.comm.json import ScriptRun, dump_recordings, join_recordings
from pytest_fsdp_comm.snapshots.comm_text import format_profile

OLD, NEW = (format_profile(sample_profiles.profile(layers=layers)) for layers in (3, 4))
COMM = "test_a/test_x.ws8.comm"
RUN = ScriptRun(script="train model.py", arguments=(), is_module=False, first_step=4, last_step=4)
CONFTEST = "def pytest_addoption(parser):\n    parser.addini('mine', 'of the project')\n"
SETTINGS = {
    "warnings": ("pytest.ini", "[pytest]\nfilterwarnings = error"),
    # The category cannot be imported before pytest has changed sys.path.
    "category": ("pytest.ini", "[pytest]\nfilterwarnings = error::training.OurWarning"),
    "strict": ("pytest.ini", "[pytest]\naddopts = --strict-config\nmine = 1"),
    "no-cache": ("pytest.ini", "[pytest]\naddopts = -p no:cacheprovider\ncache_dir = x"),
    "all": (
        "pyproject.toml",
        "[tool.pytest.ini_options]\naddopts = '--strict-config -Werror -p no:cacheprovider'\n"
        "filterwarnings = ['error']\nmine = '1'",
    ),
    "environment": ("pytest.ini", "[pytest]"),
    "toml": (
        "pytest.toml",
        "[pytest]\nstrict = true\naddopts = ['-p', 'no:cacheprovider']\nmine = '1'\n"
        "filterwarnings = ['error']",
    ),
}
ENVIRONMENT = "-Werror -p no:cacheprovider"


@pytest.fixture(
    params=[
        os.fsdecode(b"a b caf\xe9"),
        *(pytest.param(name, marks=pytest.mark.costly) for name in ("a b", "a{b}'$x")),
    ]
)
def directory(request, tmp_path, monkeypatch):
    directory = tmp_path / request.param
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.mark.parametrize("settings", SETTINGS)
def test_commands_work_in_strict_projects(fsdp_comm, directory, write, monkeypatch, settings):
    name, text = SETTINGS[settings]
    monkeypatch.setenv("PYTEST_ADDOPTS", ENVIRONMENT if settings == "environment" else "")
    files = {
        name: text,
        "conftest.py": CONFTEST,
        f"snapshots/{COMM}": OLD,
        f"ci/expected/{COMM}": OLD,
        f"ci/received/{COMM}": NEW,
        "step.json": join_recordings({0: dump_recordings([recording(0)])}, RUN),
        "step.tree.comm": TREE,
        "train model.py": "",
    }
    for file, content in files.items():
        write(directory / file, content)
    (directory.parent / "pytest.ini").unlink()  # of the fixture `project`
    diff = fsdp_comm("diff", "ci/expected", "ci/received")
    assert (diff.status, diff.lines[0], diff.err) == (1, f"{COMM}:", "")
    show = fsdp_comm("show", f"ci/received/{COMM}")
    assert (show.status, show.lines[0][:26], show.err) == (0, "communication of 8 ranks (", "")
    accept = fsdp_comm("accept", "ci")
    assert (accept.status, accept.lines[-1], accept.err) == (0, "1 file accepted", "")
    assert (directory / "snapshots" / COMM).read_text() == NEW
    test = fsdp_comm("test", "step.json")
    assert (test.status, test.err) == (0, "")
    assert test.lines[0].startswith("wrote test_train_model.py and snapshots/test_train_model: ")
