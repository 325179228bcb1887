"""The README's commands print the outputs that it shows."""

import re
import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def test_readme_first_test_fails_records_and_fails(pytester):
    (code,) = blocks("python")
    recorded, failed = blocks("text")
    pytester.makepyfile(test_first=code)
    arguments = ("-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1)
    assert "record it: pytest --snapshot-update" in result.stdout.str()
    pytester.runpytest_subprocess(*arguments, "--snapshot-update").assert_outcomes(passed=1)
    file = pytester.path / "snapshots" / "test_first" / "test_train_step.ws4.comm"
    assert set(recorded.splitlines()) <= set(file.read_text().splitlines())

    step = "model(torch.randn(8, 64)).sum().backward()"
    assert code.count(step) == 1
    split = "for part in torch.randn(8, 64).chunk(4):\n            model(part).sum().backward()"
    pytester.makepyfile(test_first=code.replace(step, split))
    result = pytester.runpytest_subprocess(*arguments)
    result.assert_outcomes(failed=1)
    assert failed in result.stdout.str()


def test_readme_commands_match_ci():
    commands = blocks("console")[0].splitlines()
    assert commands == ["$ python3 run.py demo", "$ python3 run.py test"]
    ci = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in ci if line.startswith("python3 run.py")] == [
        command.removeprefix("$ ") for command in commands
    ]
    for arguments in runpy.run_path(str(ROOT / "run.py"))["COMMANDS"].values():
        assert f"`{' '.join(['pytest', *arguments])}`" in README.replace("\n", " ")
