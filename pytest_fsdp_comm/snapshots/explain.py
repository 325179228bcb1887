"""Says why a comparison with a snapshot failed, and how to accept it."""

from __future__ import annotations

import os
import re
import shlex
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import pytest
from syrupy.terminal import disable_color

from pytest_fsdp_comm.comm.profile import has_further_ranks
from pytest_fsdp_comm.errors import IncompleteRecordingError, SnapshotFormatError
from pytest_fsdp_comm.marker import snapshot_test_name, snapshot_variant
from pytest_fsdp_comm.reports.ci.outcomes import Comparisons
from pytest_fsdp_comm.reports.explanation import (
    ACCEPT,
    BESIDE,
    READ,
    RECORD,
    Failure,
    FailureText,
    show_everything,
    show_on_screen,
)
from pytest_fsdp_comm.snapshots.differences import (
    Difference,
    call_sites,
    evidence_of,
    explain_profiles,
    head_of,
    headline_of_values,
)
from pytest_fsdp_comm.snapshots.extension import CommSnapshot
from pytest_fsdp_comm.snapshots.failed_comparison import FAILED_COMPARISON, UNEXPLAINED
from pytest_fsdp_comm.snapshots.names import SUFFIX, read_basename, written_test
from pytest_fsdp_comm.snapshots.unused import describe_neighbour
from pytest_fsdp_comm.text.words import shell_word, show_path

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syrupy.assertion import AssertionResult

    from pytest_fsdp_comm.snapshots.documents import Profile, SnapshotText
    from pytest_fsdp_comm.snapshots.extension import CommSnapshotExtension


# Options that an accept command leaves out: they choose other tests, or only change what is shown.
_DROPPED_LETTERS: Final = frozenset("xvqsl")
_DROPPED: Final = frozenset(
    {
        *("--exitfirst", "--last-failed", "--lf", "--failed-first", "--ff", "--new-first", "--nf"),
        *("--stepwise", "--sw", "--stepwise-skip", "--sw-skip", "--stepwise-reset", "--sw-reset"),
        *("--verbose", "--quiet", "--showlocals", "--no-header", "--no-summary", "--full-trace"),
        *("--collect-only", "--co", "--setup-show", "--cache-clear", "--disable-warnings"),
        *("--pdb", "--trace", "--snapshot-update", "--snapshot-update-new-only"),
        *("--snapshot-warn-unused", "--snapshot-details", "--snapshot-no-cleanup"),
        *("--snapshot-disable-unused", "--snapshot-no-colors"),
    }
)
_DROPPED_WITH_VALUE: Final = frozenset(
    {
        *("-k", "-m", "-n", "-r", "--numprocesses", "--maxprocesses", "--dist", "--maxfail"),
        *("--tb", "--basetemp", "--randomly-seed", "--comm-report", "--comm-summary"),
        *("--deselect", "--ignore", "--ignore-glob", "--last-failed-no-failures", "--lfnf"),
        *("--junitxml", "--junit-xml", "--durations", "--durations-min", "--color", "--capture"),
        *("--show-capture", "--verbosity", "--comm-artifacts", "--pdb-rank", "--rank-slots"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedComparison:
    """The last comparison of a test that failed and was explained."""

    first_line: str
    """Of the explanation, by which the failure is recognized that it belongs to."""
    comparisons: Comparisons
    """What differs; the files are added to the report of the whole test."""
    below: str
    """What the section below shows; empty for none."""
    lines: tuple[str, ...] = ()
    """The explanation, where pytest does not show it; empty where it does."""


def explain_comparison(left: object, right: object) -> list[str] | None:
    """Explain a failed assertion, most important line first; None if it passed or is not ours."""
    assertion = right if isinstance(right, CommSnapshot) else left
    if not isinstance(assertion, CommSnapshot):
        return None
    results = {name: result for name, result in assertion.last_results if not result.success}
    if not results:
        return None
    item = assertion.test_location.item
    if UNEXPLAINED in item.stash:
        del item.stash[UNEXPLAINED]
    accept, differences = _explain(assertion, results)
    for name, result in results.items():
        if result.exception is None and assertion.explains:
            _keep(assertion.extension, result, differences[name].explanation)
    failures = [
        Failure(
            name=name,
            explanation=differences[name].explanation,
            difference=_file_lines(assertion.extension, result),
        )
        for name, result in results.items()
    ]
    beside = _unreached(assertion)
    shown = everything = show_everything(failures, accept=accept, beside=beside)
    if not _is_verbose(item.config):
        shown = show_on_screen(failures, accept=accept, beside=beside)
    item.stash[FAILED_COMPARISON] = FailedComparison(
        first_line=shown.lines[0],
        below="\n".join(shown.below),
        comparisons=Comparisons(
            files=(),
            headline=headline_of_values(differences) if assertion.explains else "",
            story=tuple(line for line in everything.lines if not line.startswith(ACCEPT)),
            told=tuple(line for one in failures for line in one.explanation.told),
            sent=tuple(change for one in failures for change in one.explanation.sent),
            cost=tuple(line.strip() for one in failures for line in one.explanation.cost),
            # Where there is no snapshot yet, the story has the command.
            accept="" if any(line.startswith(RECORD) for line in everything.lines) else accept,
        ),
    )
    return list(shown.lines)


def explain_bare_failure(item: pytest.Item, error: BaseException | None) -> None:
    """Explain a failed comparison whose assertion pytest did not rewrite."""
    # As in a module that is neither a test module nor registered for it, with --assert=plain, or
    # where the result was kept in a variable. Any message of its own is about something else.
    if not isinstance(error, AssertionError) or str(error) not in {"", "assert False"}:
        return
    lines = explain_comparison(None, item.stash.get(UNEXPLAINED, None))
    if lines is not None:
        item.stash[FAILED_COMPARISON] = replace(item.stash[FAILED_COMPARISON], lines=tuple(lines))


def explain_result(
    assertion: CommSnapshot, name: str, result: AssertionResult
) -> tuple[tuple[str, ...], str]:
    """Return all lines of the explanation, even if the whole passed; and each change in a line."""
    _, differences = _explain(assertion, {name: result})
    explanation = differences[name].explanation
    return explanation.full, "\n".join(explanation.told) or headline_of_values(differences)


def _difference(
    assertion: CommSnapshot, name: str, sides: tuple[Profile, Profile], where: str, accept: str
) -> Difference:
    """Why a value of the last comparison differs; found once, and by one rank."""
    if not assertion.explains:
        return Difference(explanation=head_of(sides, where=where))
    if name not in assertion.differences:
        # Trees of the same comparison are evidence for each of these values.
        trees = [found for _, one in assertion.last_results for found in _compared_profiles(one)]
        assertion.differences[name] = explain_profiles(
            sides, where=where, evidence=evidence_of(trees), accept=accept
        )
    return assertion.differences[name]


def _explain(
    assertion: CommSnapshot, results: Mapping[str, AssertionResult]
) -> tuple[str, dict[str, Difference]]:
    """The command that accepts these values of the last comparison; how they differ, by name."""
    item = assertion.test_location.item
    accept = _accept_command(item, list(results.values()))
    differences = {}
    for name, result in results.items():
        where = show_path(Path(result.snapshot_location), item.config.rootpath)
        if result.exception is not None:
            lines = tuple(describe_error(result, item.config.rootpath).splitlines())
            explanation = FailureText(short=lines, full=lines)
            text = describe_problem(result.exception, where=where)
            differences[name] = Difference(explanation=explanation, text=text)
        elif result.recalled_data is None:
            path = Path(result.snapshot_location)
            lines = (f"there is no snapshot {where} yet",)
            text = str(result.asserted_data)
            if assertion.explains and (neighbour := describe_neighbour(item, path, text)):
                lines += (f"  {neighbour}",)
            lines += (f"{RECORD}{accept}", READ) if accept else ()
            explanation = FailureText(short=lines, full=lines)
            differences[name] = Difference(explanation=explanation, text="no snapshot yet")
        for sides in _compared_profiles(result):
            differences[name] = _difference(assertion, name, sides, where, accept)
    return accept, differences


def _file_lines(extension: CommSnapshotExtension, result: AssertionResult) -> tuple[str, ...]:
    if not _compared_profiles(result):
        return ()
    with disable_color():
        return tuple(extension.diff_lines(result.asserted_data, result.recalled_data))


def _is_verbose(config: pytest.Config) -> bool:
    is_ci = any(os.environ.get(name) for name in ("CI", "BUILD_NUMBER"))
    return is_ci or config.get_verbosity(config.VERBOSITY_ASSERTIONS) > 1


def _accept_command(item: pytest.Item, failed: Sequence[AssertionResult]) -> str:
    """The command that accepts what failed; empty if an update would refuse it."""
    if any(result.exception is not None for result in failed):
        return ""
    accept = _update_command(item)
    # An update refuses to replace files of ranks that do not run now, so these are removed first.
    wider = [
        shlex.quote(show_path(Path(result.snapshot_location), item.config.rootpath))
        for result in failed
        for old, new in _compared_profiles(result)
        if has_further_ranks(old, new)
    ]
    if not wider:
        return accept
    # Without the fake backend, the update records all ranks that the file has.
    command, count = re.subn(r" --comm-backend[ =]fake\b", "", accept)
    return command if count else f"rm {' '.join(wider)} && {accept}"


def _compared_profiles(result: AssertionResult) -> list[tuple[Profile, Profile]]:
    """What was reviewed and what was recorded; empty if they were not compared."""
    old, new = result.recalled_data, result.asserted_data
    if result.exception is not None or old is None or new is None:
        return []
    return [(cast("SnapshotText", old).profile, cast("SnapshotText", new).profile)]


def _unreached(assertion: CommSnapshot) -> str:
    """Name the reviewed files of the test that were not compared; empty if all were."""
    item = assertion.test_location.item
    own = (written_test(snapshot_test_name(item)), snapshot_variant(item))
    compared = {Path(done.snapshot_location) for done in assertion.executions.values()}
    directory = Path(assertion.extension.dirname(test_location=assertion.test_location))
    left = [
        path.name
        for path in sorted(directory.glob(f"*{SUFFIX}"))
        if read_basename(path.stem) == own and path not in compared
    ]
    if not left:
        return ""
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return (
        f"{BESIDE}{left[0]}{more}; "
        'assert {"comm": comm_mode, "tree": ...} == comm_snapshot compares all at once'
    )


def describe_error(result: AssertionResult, rootdir: Path) -> str:
    """Say why an assertion could not be decided or written."""
    error = result.exception
    if isinstance(error, OSError):
        return (
            f"cannot write the snapshot {show_path(Path(result.snapshot_location), rootdir)} "
            f"({error.strerror or error}); the old one, if any, is unchanged. Make the directory "
            "writable, or choose another with ini fsdp_comm_snapshot_dir"
        )
    return str(error) or type(error).__name__


def describe_problem(error: BaseException, *, where: str) -> str:
    """The same in a few words, for the headline; `where` is the path as errors have it."""
    if isinstance(error, OSError):
        return f"cannot write the snapshot ({error.strerror or error})"
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, SnapshotFormatError):
        return f"snapshot {lines[0].removeprefix(where).lstrip(', ').partition('; expected')[0]}"
    # The first gap; the line above is the same for all of them.
    return lines[1].strip() if isinstance(error, IncompleteRecordingError) else lines[0]


def _keep(
    extension: CommSnapshotExtension, result: AssertionResult, explanation: FailureText
) -> None:
    artifacts = extension.artifacts(result.snapshot_location)
    if artifacts is None or result.asserted_data is None:
        return
    old, new = cast("SnapshotText | None", result.recalled_data), result.asserted_data
    sites = call_sites(None if old is None else old.profile, cast("SnapshotText", new).profile)
    try:
        artifacts.keep(
            received=str(new),
            expected=None if old is None else str(old),
            story=[*explanation.full, *(["", "sent by:"] if sites else []), *sites],
        )
    except OSError as problem:
        # The difference is shown all the same.
        warnings.warn(
            f"--comm-artifacts: cannot write {show_path(artifacts.received)} "
            f"({problem.strerror or problem}), so that it cannot be accepted from there",
            pytest.PytestWarning,
            stacklevel=1,
        )


def _update_command(item: pytest.Item) -> str:
    """The command that records a test again, with the settings of the last, not its selection."""
    config = item.config
    # A worker of xdist has its controller's command line only here.
    given = getattr(config, "workerinput", {}).get("mainargv", [""])[1:]
    given = given or list(map(str, config.invocation_params.args))
    kept = map(shell_word, repeated_options(given, list(map(str, config.option.file_or_dir))))
    module = os.path.relpath(item.path, config.invocation_params.dir)
    # So that it is not read as an option, or as a file of arguments.
    module = f"./{module}" if module[0] in "-@" else module
    _, separator, names = item.nodeid.partition("::")
    name = f"{module}{separator}{names}"
    # Brackets, which most names of tests have, need no escape in double quotes.
    is_plain = name.isprintable() and not re.search(r'["$`\\!]', name)
    quoted = f'"{name}"' if is_plain else shell_word(name)
    return " ".join(["pytest", "--snapshot-update", *kept, quoted])


def repeated_options(given: Sequence[str], selected: Sequence[str]) -> list[str]:
    """The arguments that a command for one test repeats: without what was `selected`."""
    rest = list(given)
    for argument in reversed(selected):
        if argument in rest:
            # The last one: an option may have the same text as its value.
            del rest[len(rest) - 1 - rest[::-1].index(argument)]
    kept: list[str] = []
    arguments = iter(rest)
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_short = re.match(r"-[A-Za-z]", argument) is not None
        if name in _DROPPED_WITH_VALUE:
            _ = None if equals else next(arguments, None)
        elif name in _DROPPED or (
            # as in -kname, -n2 or -xvs
            is_short
            and (argument[:2] in _DROPPED_WITH_VALUE or set(argument[1:]) <= _DROPPED_LETTERS)
        ):
            continue
        elif argument == "-p":
            plugin = next(arguments, "")
            # A plugin that is switched off changes no recording.
            kept += [] if plugin.startswith("no:") else ["-p", plugin]
        elif not argument.startswith("-pno:"):
            kept.append(argument)
    return kept
