"""The tests with the mark ``upstream``: enough to notice changes, few enough for all versions."""

import re
import subprocess
from pathlib import Path

import pytest
import running

pytestmark = pytest.mark.release

ROOT = Path(__file__).parents[2]

# Of each kind of test that an upstream may break, one file that has to take part.
TOPICS = {
    "FSDP1": "tests/recording/owners/test_fsdp1.py",
    "FSDP2": "tests/recording/owners/test_fsdp2.py",
    "DDP": "tests/recording/owners/test_ddp.py",
    "TP, redistributions": "tests/recording/owners/test_dtensor.py",
    "1F1B": "tests/recording/owners/test_pipelines.py",
    "arguments of calls": "tests/recording/test_call_arguments.py",
    "counts of torch": "tests/recording/test_oracles.py",
    "kernels": "tests/recording/test_kernels.py",
    "flight recorder": "tests/recording/test_witness.py",
    "checkpoints": "tests/recording/test_checkpoint_files.py",
    "compiled code": "tests/recording/test_value_dependence.py",
    "trees": "tests/sharding/test_fsdp1.py",
    "stories": "tests/regressions/test_reported.py",
    "stability": "tests/acceptance/snapshots/test_stability.py",
    "hangs": "tests/acceptance/ranks/test_hangs.py",
    "launchers": "tests/acceptance/ranks/test_torchrun.py",
    "forks after CUDA was asked": "tests/acceptance/ranks/test_without_gpus.py",
    "xdist": "tests/acceptance/test_xdist.py",
}


def collected(*arguments):
    """The ids of the tests; the command ends with 5 where there is none."""
    command = (running.PYTHON, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = subprocess.run(
        [*command, "--ignore", "tests/frameworks", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in {0, 5}, done.stdout + done.stderr
    return re.findall(r"(?m)^(tests/[\w/]+\.py)::.+$", done.stdout)


@pytest.fixture(scope="module")
def marked():
    return collected("-m", "upstream")


def test_they_are_60_to_110(marked):
    # One file has a case for each private name, which all run in one process.
    names = "tests/recording/test_private_names.py"
    assert 60 <= sum(file != names for file in marked) <= 110


def test_each_kind_takes_part(marked):
    assert {*TOPICS.values()} - {*marked} == set()


def test_every_contract_test_takes_part(marked):
    files = [str(file.relative_to(ROOT)) for file in (ROOT / "tests").rglob("test_contracts.py")]
    assert {*files} < {*marked}
    assert collected("-m", "not upstream", *files) == []
    # The files that pyproject.toml lists as guards of private names.
    text = re.sub(r"\n# ", " ", (ROOT / "pyproject.toml").read_text())
    (guards,) = re.findall(r"a contract test fails when a name changes \((.*?)\)", text)
    named = re.findall(r"test_\w+\.py", guards)
    assert len(named) > 4
    assert {*named} - {Path(file).name for file in marked} == set()
