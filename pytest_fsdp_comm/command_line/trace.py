"""``fsdp-comm trace``: a file for Perfetto."""

from __future__ import annotations

import argparse
from pathlib import Path

from pytest_fsdp_comm.comm.events import Recording
from pytest_fsdp_comm.command_line.documents import read_json, sort_ranks
from pytest_fsdp_comm.command_line.terminal import SAME
from pytest_fsdp_comm.errors import FsdpCommError
from pytest_fsdp_comm.reports.trace import dump_trace


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm trace``."""
    recordings: list[Recording] = []
    for name in options.files:
        saved = read_json(Path(name), where=name)
        if not isinstance(saved, list):
            raise FsdpCommError(f"{name}: expected a recording, got a tree")
        recordings += saved
    recordings = sort_ranks(recordings, where=", ".join(options.files))
    first = Path(options.files[0])
    output = Path(options.output) if options.output else first.with_suffix(".trace.json")
    try:
        output.write_text(dump_trace(recordings), encoding="utf-8")
    except OSError as problem:
        raise FsdpCommError(f"cannot write {output} ({problem.strerror or problem})") from None
    print(f"{output}: open it at https://ui.perfetto.dev")  # noqa: T201  # a program's output
    return SAME
