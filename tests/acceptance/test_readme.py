"""What the README shows is what happens."""

import re
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_test(pytester):
    (code,) = blocks("python")
    pytester.makepyfile(test_first=code)
    arguments = ("-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1)
    assert "record it: pytest --snapshot-update" in result.stdout.str()
    pytester.runpytest_subprocess(*arguments, "--snapshot-update").assert_outcomes(passed=1)
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["2 snapshots passed."])


def test_the_commands_are_those_of_ci():
    ci = (Path(__file__).parents[2] / ".ci" / "run").read_text()
    commands = [line[2:] for block in blocks("console") for line in block.splitlines()]
    for command in commands[1:3]:
        assert command.removesuffix(' -e ".[test]"') in ci.replace("--quiet ", "")
    assert "pytest -n 2" in README
    assert "pytest -n 2" in ci


def test_the_snapshot_that_is_explained():
    shown = next(block for block in blocks("text") if block.startswith("# pytest-fsdp-comm"))
    directory = Path(__file__).parents[2] / "snapshots" / "examples" / "test_llama"
    real = (directory / "test_train_step[untied].ws4.comm").read_text().splitlines()
    for line in shown.splitlines()[1:]:
        assert line == "..." or line in real
