"""What the README shows is what happens."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_the_first_test_fails_then_records_then_passes(pytester):
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


def test_the_two_commands_are_those_of_ci_and_what_they_run_is_told():
    commands = blocks("console")[0].splitlines()
    assert commands == ["$ python3 run.py demo", "$ python3 run.py test"]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if line.startswith("python3 run.py")] == [
        command.removeprefix("$ ") for command in commands
    ]
    for arguments in runpy.run_path(str(ROOT / "run.py"))["COMMANDS"].values():
        assert f"`{' '.join(['pytest', *arguments])}`" in README.replace("\n", " ")


def test_the_snapshot_that_is_explained_is_a_real_one():
    shown = next(block for block in blocks("text") if block.startswith("# pytest-fsdp-comm"))
    directory = ROOT / "snapshots" / "examples" / "test_llama"
    real = (directory / "test_train_step[untied].ws4.comm").read_text().splitlines()
    for line in shown.splitlines()[1:]:
        assert line == "..." or line in real
