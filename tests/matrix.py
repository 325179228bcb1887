"""Run the tests that other versions may break, with this Python, and write the results to a file.

    python tests/matrix.py docs/matrix/torch-2.13.0.json

`nox -s matrix` runs it for each of `COMBINATIONS`. `python docs/matrix_table.py` writes the results
into docs/torch-versions.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parents[1]

COMBINATIONS = {
    "torch-2.7.1": ("3.11", "torch==2.7.1"),
    "torch-2.9.1": ("3.11", "torch==2.9.1"),
    "torch-2.11.0": ("3.12", "torch==2.11.0"),
    "torch-2.13.0": ("3.11", "torch==2.13.0"),
    "torch-2.14.1": ("3.12", "torch==2.14.1"),
    "torch-2.15.0": ("3.13", "torch==2.15.0"),
    # The oldest supported versions of the other dependencies; xdist 3.6.0 was withdrawn.
    "lowest": (
        "3.11",
        "torch==2.13.0",
        "pytest==8.4.0",
        "syrupy==7.0.0",
        "pytest-xdist==3.6.1",
        "jinja2==3.1.0",
    ),
}
"""By name of the file in docs/matrix: the Python version, and pins. All else is the newest."""

# Frameworks have a separate job, as they require certain versions of torch.
RUNS = {
    "upstream": ("-m", "upstream", "-n", "2", "--ignore", "tests/frameworks"),
    "examples": ("--world-size", "4", "examples"),
}
PACKAGES = ("pytest", "syrupy", "pytest-xdist", "jinja2")
TESTED = ("pytest_fsdp_comm", "tests", "examples", "snapshots", "conftest.py", "pyproject.toml")


def main() -> None:
    """Write the file, then exit with 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    file = parser.parse_args().file
    # Read the commit first: files may change while the tests run.
    record = {"commit": _commit(), **_environment()}
    cases = {name: _cases(arguments) for name, arguments in RUNS.items()}
    record["runs"] = {
        name: dict(sorted(Counter(outcome for _, outcome, _ in run).items()))
        for name, run in cases.items()
    }
    every = [case for run in cases.values() for case in run]
    failed = sorted(test for test, outcome, _ in every if outcome == "failed")
    reasons = Counter(reason for _, outcome, reason in every if outcome == "skipped")
    record |= {"failed": failed, "skipped": dict(sorted(reasons.items()))}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    sys.exit(1 if failed else 0)


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ("git", "-C", str(ROOT), *arguments)
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    changed = git("status", "--porcelain", "--", *TESTED)
    return git("rev-parse", "--short=12", "HEAD") + (" and changes" if changed else "")


def _version() -> str:
    """Return the plugin's version; an editable installation may be of an older one."""
    installed = metadata.version("pytest-fsdp-comm")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    if installed != version:
        sys.exit(f"{installed} is installed, but this is {version}; run: pip install -e .")
    return version


def _environment() -> dict[str, Any]:
    import torch

    return {
        "date": datetime.now(UTC).date().isoformat(),
        "system": f"{platform.system()} {platform.machine()}",
        "gpus": torch.cuda.device_count(),
        "versions": {
            "pytest-fsdp-comm": _version(),
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            **{name: metadata.version(name) for name in PACKAGES},
        },
    }


def _cases(arguments: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Run pytest; return each test, its outcome, and the reason if it was skipped."""
    with tempfile.TemporaryDirectory() as place:
        report = Path(place) / "junit.xml"
        command = (sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *arguments)
        done = subprocess.run(command, cwd=ROOT, check=False)
        # 0: all passed, 1: some failed. Other statuses: interrupted, or no tests collected.
        if done.returncode not in {0, 1}:
            sys.exit(f"pytest ended with {done.returncode}, and nothing is written")
        return _read(ET.parse(report).getroot())  # noqa: S314  # pytest wrote it


def _read(report: ET.Element) -> list[tuple[str, str, str]]:
    outcomes: dict[str, tuple[str, str]] = {}
    for case in report.iter("testcase"):
        test = f"{case.get('classname')}::{case.get('name')}"
        messages = {child.tag: child.get("message") or "" for child in case}
        if messages.get("skipped") == "collection skipped":
            continue  # a whole file, whose tests are unknown
        if "failure" in messages or "error" in messages:
            outcomes[test] = ("failed", "")
        elif "skipped" in messages:
            outcomes.setdefault(test, ("skipped", messages["skipped"]))
        else:
            outcomes.setdefault(test, ("passed", ""))
    return [(test, *outcome) for test, outcome in outcomes.items()]


if __name__ == "__main__":
    main()
