"""docs/command-line.md: its commands are valid, and it names every command."""

import re
import shlex
from pathlib import Path

import pytest

from pytest_fsdp_comm.command_line.main import main

PAGE = (Path(__file__).parents[3] / "docs/command-line.md").read_text()
SHELL = "\n".join(re.findall(r"```shell\n(.*?)```", PAGE, re.DOTALL))
COMMANDS = re.findall(r"^fsdp-comm (.*)$", SHELL, re.MULTILINE)


@pytest.fixture
def commands(monkeypatch):
    """Replace all commands by a list of calls."""
    calls = []
    for name in (
        "command_line.show.run",
        "command_line.diff.run_diff",
        "command_line.accept.run",
        "command_line.write_test.run",
        "record.run",
    ):
        monkeypatch.setattr(f"pytest_fsdp_comm.{name}", lambda options: calls.append(options) or 0)
    return calls


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_the_page_are_parsed(commands, command):
    assert main(shlex.split(command, comments=True)) == 0
    assert len(commands) == 1


def test_page_names_every_command(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = set(re.findall(r"^    ([a-z-]+)\b", capsys.readouterr().out, re.MULTILINE))
    assert {
        "show",
        "diff",
        "accept",
        "record",
        "test",
        "git-diff",
    } == listed
    for name in listed:
        assert f"fsdp-comm {name}" in PAGE
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0
