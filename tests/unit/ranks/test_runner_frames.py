"""Which frames of a stack explain nothing about a test."""

from pathlib import Path

import pytest

from pytest_fsdp_comm.ranks.hangs.stacks import is_runner

PACKAGE = Path(__file__).parents[3] / "pytest_fsdp_comm"


@pytest.mark.parametrize("file", ["recording/owners/fsdp.py", "fixtures.py", "plugin.py"])
def test_the_plugins_own_frames_are_none_of_the_user_in_a_clone_too(file):
    assert (PACKAGE / file).exists()
    assert is_runner(str(PACKAGE / file))


def test_a_users_file_is_not_the_plugins_whatever_its_directory_is_called():
    assert not is_runner("/home/user/pytest_fsdp_comm/tests/test_model.py")
    assert not is_runner(str(PACKAGE.parent / "examples/llama_training.py"))
