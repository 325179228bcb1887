"""Explain why a comparison with a snapshot failed, and how to accept the difference."""

from __future__ import annotations

import itertools
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, cast

import pytest
from syrupy.assertion import AssertionResult
from syrupy.terminal import disable_color

from pytest_fsdp_comm.errors import IncompleteRecordingError, SnapshotFormatError
from pytest_fsdp_comm.reports.ci.outcomes import Comparisons
from pytest_fsdp_comm.reports.explanation import (
    ACCEPT,
    RECORD,
    FailureText,
    failure_lines,
    summary_lines,
)
from pytest_fsdp_comm.snapshots.differences import (
    Difference,
    evidence_of,
    explain_profiles,
    head_of,
    headline_of_values,
)
from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText, has_further_ranks
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.snapshots.failed_comparison import (
    FAILED_COMPARISON,
    UNEXPLAINED,
    FailedComparison,
)
from pytest_fsdp_comm.snapshots.unused import describe_neighbour, path_from
from pytest_fsdp_comm.text.words import shell_word, show_path

# Options that the accept command has to repeat, because they affect the recording.
_OPTIONS: Final = ("--world-size", "--comm-backend")
# Configuration files. pytest may choose the directory of one of them as its root.
_SETTINGS: Final = ("pytest.toml", "pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


def explain_comparison(left: object, right: object) -> list[str] | None:
    """Explain a failed assertion; return None if it passed or does not use ``comm_snapshot``."""
    assertion = right if isinstance(right, CommSnapshot) else left
    if not isinstance(assertion, CommSnapshot):
        return None
    results = {name: result for name, result in assertion.last_results if not result.success}
    if not results:
        return None
    item = assertion.test_location.item
    if UNEXPLAINED in item.stash:
        del item.stash[UNEXPLAINED]
    differences = _explain(assertion, results)
    for result in results.values():
        if result.exception is None and result.asserted_data is not None and assertion.explains:
            assertion.extension.keep_artifacts(
                result.snapshot_location,
                received=str(result.asserted_data),
                expected=None if result.recalled_data is None else str(result.recalled_data),
            )
    texts = {name: difference.explanation for name, difference in differences.items()}
    accept = _accept_command(item, list(results.values()))
    everything = failure_lines(texts, accept=accept, everything=True)
    is_ci = any(os.environ.get(name) for name in ("CI", "BUILD_NUMBER"))
    is_verbose = is_ci or item.config.get_verbosity(pytest.Config.VERBOSITY_ASSERTIONS) > 1
    lines = everything if is_verbose else failure_lines(texts, accept=accept)
    item.stash[FAILED_COMPARISON] = FailedComparison(
        first_line=lines[0],
        below="\n".join(_file_lines(assertion, results)) if is_verbose else "",
        comparisons=Comparisons(
            files=(),
            headline=headline_of_values(differences) if assertion.explains else "",
            explanation=tuple(line for line in everything if not line.startswith(ACCEPT)),
            summaries=summary_lines(texts.values()),
            sent=tuple(change for text in texts.values() for change in text.sent),
            cost=tuple(line for text in texts.values() for line in text.cost),
            # If there is no snapshot yet, the explanation already contains a command.
            accept="" if any(line.startswith(RECORD) for line in everything) else accept,
            test=_quoted_id(item),
        ),
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
    lines = explain_comparison(None, item.stash.get(UNEXPLAINED, None))
    if lines is not None:
        item.stash[FAILED_COMPARISON] = replace(item.stash[FAILED_COMPARISON], lines=tuple(lines))


def fail_unasserted(item: pytest.Item) -> None:
    """Fail a test that ignored a failed comparison, with the same text as a failed assertion."""
    assertion = item.stash[UNEXPLAINED]
    lines = explain_comparison(None, assertion) or []
    at = f"  compared at {assertion.compared_at}, where the test ignored the result: assert it"
    below = item.stash[FAILED_COMPARISON].below
    pytest.fail("\n".join([*lines, at, *filter(None, [below])]), pytrace=False)


def explain_result(
    assertion: CommSnapshot, name: str, result: AssertionResult
) -> tuple[FailureText, str, str]:
    """Return a value's explanation, the command that accepts its change, and its headline."""
    difference = _explain(assertion, {name: result})[name]
    explanation = difference.explanation
    headline = "\n".join(explanation.summaries) or headline_of_values({name: difference})
    return explanation, _accept_command(assertion.test_location.item, [result]), headline


def _explain(
    assertion: CommSnapshot, results: Mapping[str, AssertionResult]
) -> dict[str, Difference]:
    """Explain why each result failed; the mappings are keyed by the names of compared values."""
    root = assertion.test_location.item.config.rootpath
    differences = {}
    for name, result in results.items():
        where = show_path(Path(result.snapshot_location), root)
        if result.exception is not None:
            error = str(result.exception) or type(result.exception).__name__
            explanation = FailureText.of_text(error)
            text = describe_problem(result.exception, where=where)
            differences[name] = Difference(explanation=explanation, text=text)
        elif result.recalled_data is None:
            # The test was probably renamed, or its snapshot is for a different world size.
            neighbour = assertion.explains and describe_neighbour(
                assertion.test_location.item,
                Path(result.snapshot_location),
                str(result.asserted_data),
            )
            explanation = FailureText(
                head=f"there is no snapshot {where} yet",
                changes=(f"  {neighbour}",) if neighbour else (),
                is_missing=True,
            )
            differences[name] = Difference(explanation=explanation, text="no snapshot yet")
        for sides in _compared_profiles(result):
            differences[name] = _difference(assertion, name, sides, where)
    return differences


def _difference(
    assertion: CommSnapshot, name: str, sides: tuple[Profile, Profile], where: str
) -> Difference:
    """Explain once how a value differs; all ranks except one get only the first line."""
    if not assertion.explains:
        return Difference(explanation=head_of(sides, where=where))
    if name not in assertion.differences:
        # Trees that were compared together with a recording help explain its changes.
        pairs = [
            pair for _, result in assertion.last_results for pair in _compared_profiles(result)
        ]
        assertion.differences[name] = explain_profiles(
            sides, where=where, evidence=evidence_of(pairs)
        )
    return assertion.differences[name]


def _file_lines(assertion: CommSnapshot, results: Mapping[str, AssertionResult]) -> Iterator[str]:
    """Yield the diff of each file, preceded by its value and path if there are several files."""
    root = assertion.test_location.item.config.rootpath
    for name, result in results.items():
        if _compared_profiles(result):
            where = show_path(Path(result.snapshot_location), root)
            yield from [f"{name}: {where}"] if len(results) > 1 else []
            with disable_color():
                yield from assertion.extension.diff_lines(
                    result.asserted_data, result.recalled_data
                )


def _accept_command(item: pytest.Item, failed: Sequence[AssertionResult]) -> str:
    """Return the command that accepts the failed comparisons; empty if an update would fail."""
    if any(result.exception is not None for result in failed):
        return ""
    # An update refuses to replace a recording that has more ranks, so first remove its file.
    wider = [
        shlex.quote(path_from(item.config, Path(result.snapshot_location)))
        for result in failed
        for old, new in _compared_profiles(result)
        if has_further_ranks(old, new)
    ]
    options = {name: item.config.getoption(name) for name in _OPTIONS}
    # Without --comm-backend=fake, the update records all ranks, so it can replace the file.
    if wider and options["--comm-backend"] == "fake":
        wider, options["--comm-backend"] = [], None
    remove = f"rm {' '.join(wider)} && " if wider else ""
    args = [f"{name}={value}" for name, value in options.items() if value is not None]
    args += _root_options(item)
    return " ".join([f"{remove}pytest --snapshot-update", *args, _quoted_id(item)])


def _root_options(item: pytest.Item) -> list[str]:
    """Return options that keep pytest's root directory the same if only this test is selected."""
    config = item.config
    below = itertools.takewhile(lambda path: path != config.rootpath, item.path.parents)
    files = [path / f"{dot}{name}" for path in below for name in _SETTINGS for dot in ("", ".")]
    given = config.option.rootdir or config.option.inifilename
    if not given and not any(file.exists() for file in files):
        return []
    paths = {"--rootdir": config.rootpath, "--config-file": config.inipath}
    return [f"{key}={shlex.quote(path_from(config, path))}" for key, path in paths.items() if path]


def _compared_profiles(result: AssertionResult) -> list[tuple[Profile, Profile]]:
    """List the profiles of snapshot and recording as one pair; empty if nothing was compared."""
    old, new = result.recalled_data, result.asserted_data
    if result.exception is not None or old is None or new is None:
        return []
    return [(cast("SnapshotText", old).profile, cast("SnapshotText", new).profile)]


def describe_problem(error: BaseException, *, where: str) -> str:
    """Shorten an error for the headline; `where` is the file's path as the error prints it."""
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, SnapshotFormatError):
        return f"snapshot {lines[0].removeprefix(where).lstrip(', ').partition('; expected')[0]}"
    # Use line 1, which names the first gap; line 0 is the same for all gaps of a kind.
    return lines[1].strip() if isinstance(error, IncompleteRecordingError) else lines[0]


def _quoted_id(item: pytest.Item) -> str:
    module = path_from(item.config, item.path)
    # pytest would read a leading "-" as an option, and "@" as a file of arguments.
    module = f"./{module}" if module[0] in "-@" else module
    _, separator, names = item.nodeid.partition("::")
    name = f"{module}{separator}{names}"
    # Double quotes are enough for brackets, which occur in the ids of most parametrized tests.
    is_plain = name.isprintable() and not re.search(r'["$`\\!]', name)
    return f'"{name}"' if is_plain else shell_word(name)
