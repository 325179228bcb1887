"""Says why a comparison with a snapshot failed, and how to accept it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syrupy.assertion import SnapshotAssertion
from syrupy.terminal import disable_color

from pytest_fsdp_comm.diff import compare
from pytest_fsdp_comm.document import parse_profile, read_header
from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.options import OPTIONS
from pytest_fsdp_comm.render.text import Explanation, render_comparison
from pytest_fsdp_comm.render.tree_changes import render_tree_changes
from pytest_fsdp_comm.snapshot_files import shown_path, write_atomically
from pytest_fsdp_comm.snapshots import CommSnapshotExtension
from pytest_fsdp_comm.tree_diff import compare_trees
from pytest_fsdp_comm.tree_text import parse_tree

if TYPE_CHECKING:
    import pytest
    from syrupy.assertion import AssertionResult


def explain_comparison(config: pytest.Config, left: object, right: object) -> list[str] | None:
    """Explains a failed assertion in the domain's words, the most important line first.

    What does not fit into pytest's short explanation goes into a section of the report.

    Returns:
        At most 8 lines of about 640 characters together, which is where pytest cuts (8.4 to 9.2);
        None if the assertion is not one of ours or did not fail.
    """
    assertion = right if isinstance(right, SnapshotAssertion) else left
    if not isinstance(assertion, SnapshotAssertion):
        return None
    extension = assertion.extension
    result = assertion.executions.get(assertion.num_executions - 1)
    if not isinstance(extension, CommSnapshotExtension) or result is None or result.success:
        return None
    where = shown_path(Path(result.snapshot_location), config.rootpath)
    if result.exception is not None:
        return describe_error(result, config.rootpath).splitlines()
    _keep_received(config, extension, result)
    accept = update_command(config, result.test_location.nodeid)
    if result.recalled_data is None:
        return [
            f"there is no snapshot {where} yet",
            f"  record it: {accept}",
            "  then read the file, and commit it with the test",
        ]
    explanation = _explain_difference(extension, result, where=where, accept=accept)
    with disable_color():
        difference = list(extension.diff_lines(result.asserted_data, result.recalled_data))
    details = [*(explanation.full if explanation.is_cut else ()), *difference]
    result.test_location.item.add_report_section("call", "comparison", "\n".join(details) + "\n")
    return list(explanation.short)


def describe_error(result: AssertionResult, rootdir: Path) -> str:
    """Says why an assertion could not be decided or written.

    Args:
        result: syrupy's result, with an exception.
        rootdir: pytest's root directory.
    """
    error = result.exception
    if isinstance(error, OSError):
        return (
            f"cannot write the snapshot {shown_path(Path(result.snapshot_location), rootdir)} "
            f"({error.strerror or error}); the old one, if any, is unchanged. Make the directory "
            "writable, or choose another with ini fsdp_comm_snapshot_dir"
        )
    return str(error) or type(error).__name__


def _explain_difference(
    extension: CommSnapshotExtension, result: Any, *, where: str, accept: str
) -> Explanation:
    old_text, new_text = result.recalled_data, result.asserted_data
    if read_header(old_text, where=where) == "comm" == read_header(new_text, where="recording"):
        new = extension.profile_of(new_text)
        comparison = compare(parse_profile(old_text), new)
        return render_comparison(comparison, snapshot=where, accept=accept, notes=new.notes)
    try:
        changes = compare_trees(
            parse_tree(old_text, where=where), parse_tree(new_text, where="the captured tree")
        )
    except SnapshotFormatError as problem:
        # A document that tells the ranks' trees apart is no single tree; its lines follow below.
        is_of_ranks = any("\nranks " in text for text in (old_text, new_text))
        why = () if is_of_ranks else (f"  {problem}",)
        lines = (f"fsdp_tree differs from {where}", *why, f"  accept: {accept}")
        return Explanation(short=lines, full=lines, is_cut=False)
    return render_tree_changes(changes, snapshot=where, accept=accept)


def _keep_received(config: pytest.Config, extension: CommSnapshotExtension, result: Any) -> None:
    """With ``--comm-artifacts``: keeps what was received, to be accepted by copying it over."""
    directory = config.stash[OPTIONS].artifacts_dir
    if directory is None or result.asserted_data is None:
        return
    path = directory / Path(result.snapshot_location).relative_to(extension.root)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, str(result.asserted_data))


def update_command(config: pytest.Config, nodeid: str) -> str:
    """The command that records a test anew, as the user would type it."""
    parts = ["pytest", "--snapshot-update"]
    for flag in ("--world-size", "--comm-backend"):
        given = config.getoption(flag)
        if given is not None:
            parts.append(f"{flag} {given}")
    escaped = re.sub(r'([\\"$`])', r"\\\1", nodeid)
    return " ".join([*parts, f'"{escaped}"'])
