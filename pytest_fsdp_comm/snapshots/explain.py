"""Explain why a comparison with a snapshot failed, and how to accept the difference."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

import pytest
from syrupy.assertion import AssertionResult
from syrupy.terminal import disable_color

from pytest_fsdp_comm.errors import IncompleteRecordingError, SnapshotFormatError, printable
from pytest_fsdp_comm.reports.explanation import (
    NO_SNAPSHOT,
    Failure,
    failure_lines,
    join_failures,
    split_failure_lines,
)
from pytest_fsdp_comm.snapshots.differences import evidence_of, explain_profiles, make_failure_head
from pytest_fsdp_comm.snapshots.documents import (
    Profile,
    SnapshotText,
    divergence_of,
    has_lost_ranks,
)
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.snapshots.failed_comparison import (
    FAILED_COMPARISON,
    UNEXPLAINED,
    FailedComparison,
)
from pytest_fsdp_comm.snapshots.neighbours import MISSING, describe_neighbour, path_from
from pytest_fsdp_comm.text.words import shell_word, show_path

# Options that the accept command has to repeat, because they affect the recording.
_OPTIONS: Final = ("--world-size", "--comm-backend")
# Configuration files. pytest may choose the directory of one of them as its root.
_SETTINGS: Final = ("pytest.toml", "pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


def explain_comparison(
    left: object, right: object, *, is_truncated: bool = True
) -> list[str] | None:
    """Explain a failed assertion; return None if it passed or does not use ``comm_snapshot``.

    If `is_truncated`, pytest truncates the result, so the lines that do not fit go below it.
    """
    assertion = right if isinstance(right, CommSnapshot) else left
    if not isinstance(assertion, CommSnapshot):
        return None
    results = {name: result for name, result in assertion.last_results if not result.success}
    if not results:
        return None
    item = assertion.test_location.item
    if UNEXPLAINED in item.stash:
        del item.stash[UNEXPLAINED]
    for result in results.values():
        if _is_acceptable(result) and result.asserted_data is not None and assertion.explains:
            assertion.extension.keep_artifacts(
                result.snapshot_location,
                received=str(result.asserted_data),
                expected=None if result.recalled_data is None else str(result.recalled_data),
            )
    failure = explain_results(assertion, results)
    is_ci = any(os.environ.get(name) for name in ("CI", "BUILD_NUMBER"))
    is_verbose = is_ci or item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS) > 1
    lines = failure_lines(failure)
    below: tuple[str, ...] = ()
    if is_verbose:
        below = tuple(map(printable, _list_diff_lines(assertion, results)))
    elif is_truncated:
        lines, below = split_failure_lines(failure)
    item.stash[FAILED_COMPARISON] = FailedComparison(
        failure=failure, is_explained=assertion.explains, below=below
    )
    return list(lines)


def explain_bare_failure(item: pytest.Item, error: BaseException | None) -> None:
    """Explain a failed comparison whose assertion pytest did not rewrite."""
    # pytest rewrites assertions only in test modules and registered modules, and nowhere with
    # --assert=plain. It also cannot explain a result that the test first stored in a variable. Such
    # assertions fail with one of the messages in `bare`.
    bare = {"", "assert False", "False is not true"}
    if not isinstance(error, AssertionError) or str(error) not in bare:
        return
    lines = explain_comparison(None, item.stash.get(UNEXPLAINED, None), is_truncated=False)
    if lines is not None:
        failed = item.stash[FAILED_COMPARISON]
        below = (*lines, *failed.below)
        item.stash[FAILED_COMPARISON] = replace(failed, below=below, is_bare=True)


def fail_unasserted(item: pytest.Item) -> None:
    """Fail a test that ignored a failed comparison, with the same text as a failed assertion."""
    assertion = item.stash[UNEXPLAINED]
    lines = explain_comparison(None, assertion, is_truncated=False) or []
    where = f"  compared at {assertion.compared_at}, where the test ignored the result: assert it"
    below = item.stash[FAILED_COMPARISON].below
    pytest.fail("\n".join([*lines, where, *below]), pytrace=False)


def explain_results(assertion: CommSnapshot, results: Mapping[str, AssertionResult]) -> Failure:
    """Explain why results, keyed by the names of values, failed, and how to accept the changes."""
    item = assertion.test_location.item
    root = item.config.rootpath
    failures = {}
    for name, result in results.items():
        where = show_path(Path(result.snapshot_location), root)
        if result.exception is not None:
            error = str(result.exception) or type(result.exception).__name__
            problem = shorten_error(result.exception, where=where)
            failures[name] = Failure.from_error(error, problem)
        elif result.recalled_data is None:
            # The test was probably renamed, or its snapshot is for a different world size.
            neighbour = assertion.explains and describe_neighbour(
                item, Path(result.snapshot_location), str(result.asserted_data)
            )
            error = f"{MISSING}{where} yet\n" + (f"  {neighbour}" if neighbour else "")
            failures[name] = Failure.from_error(error, NO_SNAPSHOT)
        for sides in _list_compared_profiles(result):
            failures[name] = _explain_differing_value(assertion, name, sides, where)
    return join_failures(
        failures, command=_make_accept_command(item, [*results.values()]), test=_quote_test_id(item)
    )


def _explain_differing_value(
    assertion: CommSnapshot, name: str, sides: tuple[Profile, Profile], where: str
) -> Failure:
    """Explain once how a value differs; all ranks except one get only the first line."""
    if not assertion.explains:
        return make_failure_head(sides, where=where)
    if name not in assertion.failures:
        # Trees that were compared together with a recording help explain its changes.
        pairs = [
            pair for _, result in assertion.last_results for pair in _list_compared_profiles(result)
        ]
        assertion.failures[name] = explain_profiles(sides, where=where, evidence=evidence_of(pairs))
    return assertion.failures[name]


def _list_diff_lines(
    assertion: CommSnapshot, results: Mapping[str, AssertionResult]
) -> Iterator[str]:
    """Yield the diff of each file, preceded by its value and path if there are several files."""
    root = assertion.test_location.item.config.rootpath
    for name, result in results.items():
        if _list_compared_profiles(result):
            where = show_path(Path(result.snapshot_location), root)
            yield from [f"{name}: {where}"] if len(results) > 1 else []
            with disable_color():
                yield from assertion.extension.diff_lines(
                    result.asserted_data, result.recalled_data
                )


def _make_accept_command(item: pytest.Item, failed: Sequence[AssertionResult]) -> str:
    """Return `Failure.command` for the failed comparisons; empty if an update would fail."""
    if not all(map(_is_acceptable, failed)):
        return ""
    # An update refuses to replace a recording that has more ranks, so first remove its file.
    wider = [
        shell_word(path_from(item.config, Path(result.snapshot_location)))
        for result in failed
        for old, new in _list_compared_profiles(result)
        if has_lost_ranks(old, new)
    ]
    options = {name: item.config.getoption(name) for name in _OPTIONS}
    # Without --comm-backend=fake, the update records all ranks, so it can replace the file.
    if wider and options["--comm-backend"] == "fake":
        wider, options["--comm-backend"] = [], None
    remove = f"rm {' '.join(wider)} && " if wider else ""
    args = [f"{name}={value}" for name, value in options.items() if value is not None]
    args += _make_root_options(item)
    return " ".join([f"{remove}pytest --snapshot-update", *args, ""])


def _is_acceptable(result: AssertionResult) -> bool:
    """Return whether an update could write the recording."""
    # Without an exception, the data is a `SnapshotText`, or None if nothing was recorded.
    data = cast("SnapshotText | None", result.asserted_data)
    return result.exception is None and not (data is not None and divergence_of(data.profile))


def _make_root_options(item: pytest.Item) -> list[str]:
    """Return options that keep pytest's root directory the same if only this test is selected."""
    config = item.config
    parents = itertools.takewhile(lambda path: path != config.rootpath, item.path.parents)
    files = [path / f"{dot}{name}" for path in parents for name in _SETTINGS for dot in ("", ".")]
    is_set = config.option.rootdir or config.option.inifilename
    if not is_set and not any(file.exists() for file in files):
        return []
    paths = {"--rootdir": config.rootpath, "--config-file": config.inipath}
    return [f"{key}={shell_word(path_from(config, path))}" for key, path in paths.items() if path]


def _list_compared_profiles(result: AssertionResult) -> list[tuple[Profile, Profile]]:
    """List the profiles of snapshot and recording as one pair; empty if nothing was compared."""
    old, new = result.recalled_data, result.asserted_data
    if result.exception is not None or old is None or new is None:
        return []
    return [(cast("SnapshotText", old).profile, cast("SnapshotText", new).profile)]


def shorten_error(error: BaseException, *, where: str) -> str:
    """Shorten an error for the headline; `where` is the file's path as the error prints it."""
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, SnapshotFormatError):
        return f"snapshot {lines[0].removeprefix(where).lstrip(', ').partition('; expected')[0]}"
    # Use line 1, which names the first gap; line 0 is the same for all gaps of a kind.
    return lines[1].strip() if isinstance(error, IncompleteRecordingError) else lines[0]


def _quote_test_id(item: pytest.Item) -> str:
    module = path_from(item.config, item.path)
    # pytest would read a leading "-" as an option, and "@" as a file of arguments.
    module = f"./{module}" if module[0] in "-@" else module
    _, separator, names = item.nodeid.partition("::")
    name = f"{module}{separator}{names}"
    # Double quotes are enough for brackets, which occur in the ids of most parametrized tests.
    is_plain = printable(name) == name and not re.search(r'["$`\\!]', name)
    return f'"{name}"' if is_plain else shell_word(name)
