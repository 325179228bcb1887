"""``fsdp-comm audit``: checks all snapshot files against what pytest collects."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pytest_fsdp_comm.command_line.terminal import DIFFERENT, SAME, Printer
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.snapshots.audit import (
    OUTPUT,
    Collection,
    find_faults,
    snapshot_files,
)
from pytest_fsdp_comm.text.codec import from_json
from pytest_fsdp_comm.text.words import counted, show_path

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

# pytest's exit statuses of a collection that ended well, the second one without a test.
_COLLECTED: Final = frozenset({0, 5})
_LONGEST_QUOTE: Final = 20


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm audit``."""
    arguments = [*options.arguments, *options.rest[1:]]
    collections = [
        _collect([*([f"--world-size={size}"] if size else []), *arguments])
        for size in options.sizes or [""]
    ]
    faults = find_faults(collections)
    files = snapshot_files(collections[0].snapshot_dir)
    where = show_path(collections[0].snapshot_dir)
    lines = [f"{show_path(one.path)}: {one.fault}: {one.what}" for one in faults]
    counts = Counter(one.fault for one in faults)
    found = ", ".join(f"{count} {fault}" for fault, count in counts.items()) or "no faults"
    tests = len(
        {
            (place, test.name)
            for one in collections
            for place, module in one.modules.items()
            for test in module.tests
        }
    )
    lines.append(
        f"{counted(len(files), 'snapshot file')} in {where}, {counted(tests, 'test')}: {found}"
    )
    if counts["variant"]:
        lines.append(
            "If tests also run with other --world-size values, name them: "
            "fsdp-comm audit --world-size 2 --world-size 4"
        )
    Printer("never").lines(lines)
    return DIFFERENT if faults else SAME


def _collect(arguments: Sequence[str]) -> Collection:
    with tempfile.TemporaryDirectory(prefix="fsdp-comm-audit-") as directory:
        output = Path(directory, "collection.json")
        plugin = ("-p", "pytest_fsdp_comm.snapshots.collecting", f"{OUTPUT}={output}")
        command = ["-m", "pytest", "--collect-only", "-q", *plugin, *arguments]
        print(f"$ python {shlex.join(command)}", file=sys.stderr)  # noqa: T201  # says what runs
        done = subprocess.run(  # noqa: S603  # the user's own pytest
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        if done.returncode not in _COLLECTED or not output.exists():
            said = "\n".join(done.stdout.splitlines()[-_LONGEST_QUOTE:])
            raise FsdpCommError(
                "pytest cannot collect the tests, so nothing is known of their snapshots "
                f"(exit status {done.returncode}):\n{said}"
            )
        return from_json(Collection, json.loads(output.read_bytes()))
