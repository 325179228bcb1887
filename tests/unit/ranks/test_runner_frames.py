"""Which frames of a stack explain nothing about a test."""

from pathlib import Path

import pytest

from pytest_fsdp_comm.ranks.hangs.stacks import is_runner_file

PACKAGE = Path(__file__).parents[3] / "pytest_fsdp_comm"


@pytest.mark.parametrize("file", ["recording/owners/fsdp.py", "fixtures.py", "plugin.py"])
def test_plugin_frames_in_a_clone_are_not_user_code(file):
    assert (PACKAGE / file).exists()
    assert is_runner_file(str(PACKAGE / file))


def test_user_file_in_a_plugin_like_directory():
    assert not is_runner_file("/home/user/pytest_fsdp_comm/tests/test_model.py")
    assert not is_runner_file(str(PACKAGE.parent / "examples/llama_training.py"))
