"""Whether two versions of the package record the same, on every case of the suite, field by field.

    python benchmarks/compare_events.py OLD_REF [tests and options of pytest]
    python benchmarks/compare_events.py main tests/recording/owners -n 2

Runs the working tree's tests twice: with the package as it was at OLD_REF, and with the working
tree's. As a plugin of pytest, this file writes down what each `CommMode` block recorded, on each
rank. Blocks are compared by test, rank and order, all but the seconds that they took. Printed are
how many are equal for each file of tests, then what differs, by kind of change. Tests may fail:
what they recorded until then counts, and those that fail on one side only are listed.

The files of tests that differ run once more with the old package. A test that then differs from
itself, since its threads race, is listed and left out. Exit status 1 if another one differs.
"""

from __future__ import annotations

import argparse
import difflib
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from pytest_fsdp_comm.recording.comm_debug import RecordedBlock
    from pytest_fsdp_comm.recording.recorder import Recorder

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/recording", "tests/sharding", "tests/regressions", "tests/frameworks")
PACKAGE, NOTES = "COMPARE_EVENTS_PACKAGE", "COMPARE_EVENTS_NOTES"

# By these two lists of events are aligned, so that one more or less is told as such.
IDENTITY = ("kind", "op", "action", "module", "direction", "axis", "nbytes_sent", "nbytes", "text")

Blocks: TypeAlias = dict[tuple[str, int], Any]
"""What a test recorded, by the rank and which of its blocks it is."""


# As a plugin of pytest, in each process of its sessions; ranks are forked from them.


class _Plugin:
    def __init__(self) -> None:
        self._test = self._rank = ""
        self._is_watching = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self._test, self._rank = item.nodeid, os.environ.get("RANK", "0")
        if not self._is_watching:
            self._is_watching = True
            self._watch()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            _note("failed", report.nodeid)

    def _watch(self) -> None:
        from pytest_fsdp_comm.comm.json import dump_recordings  # noqa: PLC0415  # the session's package
        from pytest_fsdp_comm.recording.recorder import Recorder  # noqa: PLC0415  # as above

        finish = Recorder.finish

        def finish_and_note(recorder: Recorder) -> RecordedBlock:
            block = finish(recorder)
            text = dump_recordings([block.recording])
            _note("block", [self._test, self._rank, time.monotonic(), text])
            return block

        # Not of `CommMode.__exit__`, whose warnings name the frame that called it.
        Recorder.finish = finish_and_note  # type: ignore[assignment,method-assign]  # for this very session


def _note(kind: str, value: object) -> None:
    with Path(os.environ[NOTES], f"{os.getpid()}.{kind}").open("a") as file:
        print(json.dumps(value), file=file)


def pytest_configure(config: pytest.Config) -> None:
    """Makes sure that the package is the one that is asked for, and watches it."""
    import pytest_fsdp_comm  # noqa: PLC0415  # the session's

    if not Path(pytest_fsdp_comm.__file__).is_relative_to(os.environ[PACKAGE]):
        raise pytest.UsageError(f"{pytest_fsdp_comm.__file__} is not in {os.environ[PACKAGE]}")
    config.pluginmanager.register(_Plugin())


# As a program.


def main() -> int:
    """Records twice, and compares.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--most", type=int, default=5, help="changes shown of a kind")
    parser.add_argument("old_ref")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="tests and options of pytest")
    options = parser.parse_args()
    given = options.arguments
    if not any(map(_is_test, given)):
        given = [*TESTS, *given]
    with tempfile.TemporaryDirectory(prefix="compare-events-") as name:
        folder = Path(name)
        archive = _git("archive", options.old_ref, "pytest_fsdp_comm")
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            file.extractall(folder / "package", filter="data")
        commit = _git("rev-parse", "--short", options.old_ref).decode().strip()
        old, old_failed = _record(f"old, {commit}", folder / "package", folder, given)
        new, new_failed = _record("new, working tree", ROOT, folder, given)
        if tests := {test for test, blocks in old.items() if new.get(test) != blocks}:
            options_given = [argument for argument in given if not _is_test(argument)]
            files = sorted({test.partition("::")[0] for test in tests})
            again, _ = _record("old again", folder / "package", folder, [*options_given, *files])
            for test in sorted(tests):
                if again.get(test) != old[test]:
                    print(f"differs from itself, and is left out: {test}")
                    old.pop(test)
                    new.pop(test, None)
    for side, failed in (("old", old_failed - new_failed), ("new", new_failed - old_failed)):
        for test in sorted(failed)[: options.most]:
            print(f"fails on {side} only: {test}")
        if len(failed) > options.most:
            print(f"and {len(failed) - options.most} others on {side} only")
    return _report(old, new, options.most)


def _is_test(argument: str) -> bool:
    return Path(argument.partition("::")[0]).exists()


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout  # noqa: S607  # the git at hand


def _record(
    title: str, package: Path, folder: Path, arguments: Sequence[str]
) -> tuple[dict[str, Blocks], set[str]]:
    """What the tests record with a package, and which of them fail."""
    notes = folder / title.partition(",")[0]
    notes.mkdir()
    environment = {
        **os.environ,
        # The directory of the tests is on no path, since the working tree's package lies in it.
        "PYTHONSAFEPATH": "1",
        "PYTHONPATH": os.pathsep.join((str(package), str(ROOT / "benchmarks"))),
        PACKAGE: str(package),
        NOTES: str(notes),
    }
    # One place for both, since paths may stand in what is recorded.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "compare_events", "-p", "no:randomly"]
    command += [
        "--hypothesis-seed=0",
        f"--basetemp={folder / 'tmp'}",
        "--continue-on-collection-errors",
        *arguments,
    ]
    started = time.perf_counter()
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    summary = (done.stdout.strip().splitlines() or [""])[-1].strip("= ")
    blocks = [json.loads(line) for path in notes.glob("*.block") for line in path.open()]
    if done.returncode not in (0, 1) or not blocks:
        raise SystemExit(f"{title}: no recording can be compared:\n{done.stdout}\n{done.stderr}")
    seconds = time.perf_counter() - started
    print(f"{title}: {len(blocks)} recordings; {summary} ({seconds:.0f} s in all)", flush=True)
    recorded: dict[str, Blocks] = defaultdict(dict)
    counts = Counter[tuple[str, str]]()
    for test, rank, _, text in sorted(blocks):
        (recording,) = json.loads(text)["value"]["recordings"]
        for timing in recording["timings"]:
            timing["seconds"] = timing["seconds"] > 0
        recorded[test][rank, counts[test, rank]] = recording
        counts[test, rank] += 1
    failed = {json.loads(line) for path in notes.glob("*.failed") for line in path.open()}
    return dict(recorded), failed


def _report(old: dict[str, Blocks], new: dict[str, Blocks], most: int) -> int:
    files: dict[str, Counter[str]] = defaultdict(Counter)
    changes: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for test in sorted(old | new):
        before, after = old.get(test, {}), new.get(test, {})
        for block in sorted(before | after):
            where = f"rank {block[0]}, block {block[1]}"
            if block in before and block in after:
                is_changed = any(_changes(before[block], after[block]))
                verdict = "different" if is_changed else "equal"
                for kind, place, change in _changes(before[block], after[block]):
                    changes[kind][change].append(f"{test}, {where}{place}")
            else:
                verdict = "only old" if block in before else "only new"
                changes[f"blocks, {verdict}"][test].append(where)
            files[test.partition("::")[0]][verdict] += 1
    verdicts = ("equal", "different", "only old", "only new")
    files["all"] = sum(files.values(), Counter())
    print(f"{'':50}" + "".join(f"{verdict:>11}" for verdict in verdicts))
    for file, counts in files.items():
        print(f"{file:50}" + "".join(f"{counts[verdict]:11}" for verdict in verdicts))
    for kind, by_change in changes.items():
        count = sum(map(len, by_change.values()))
        print(f"\n{kind}: {count}")
        ordered = sorted(by_change.items(), key=lambda entry: -len(entry[1]))
        for change, places in ordered[:most]:
            print(f"  {len(places)} x {change}\n      first: {places[0]}")
        if len(ordered) > most:
            print(f"  and {len(ordered) - most} other ones (--most)")
    return 1 if changes else 0


def _changes(old: dict[str, Any], new: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """The kind of each change, where in the recording it is, and the change."""
    for name in dict.fromkeys([*old, *new]):
        before, after = old.get(name), new.get(name)
        if before == after:
            continue
        if not (isinstance(before, list) and isinstance(after, list)):
            yield name, "", f"{before!r} -> {after!r}"
            continue
        matcher = difflib.SequenceMatcher(
            None, [*map(_identity, before)], [*map(_identity, after)], autojunk=False
        )
        for _, start, end, new_start, new_end in matcher.get_opcodes():
            if end - start == new_end - new_start:
                for index in range(start, end):
                    pair = before[index], after[new_start + index - start]
                    for kind, change in _field_changes(name, *pair):
                        yield kind, f", {name} {index}", change
            else:
                for entry in before[start:end]:
                    yield f"{name}, missing", f", {name} {start}", _shown(entry)
                for entry in after[new_start:new_end]:
                    yield f"{name}, added", f", new {name} {new_start}", _shown(entry)


def _identity(entry: Any) -> Any:
    if not isinstance(entry, dict):
        return str(entry)
    return tuple(str(entry[field]) for field in IDENTITY if field in entry)


def _field_changes(name: str, old: Any, new: Any) -> Iterator[tuple[str, str]]:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield name, f"{old!r} -> {new!r}"
        return
    for field in dict.fromkeys([*old, *new]):
        before, after = (entry.get(field, "(no such field)") for entry in (old, new))
        # A field that the old version lacks is no change where it says nothing.
        if before != after and not (field not in old and not after):
            yield f"{name}.{field}", f"{before!r} -> {after!r}"


def _shown(entry: Any) -> str:
    """Without the number, by which equal ones would differ."""
    if not isinstance(entry, dict):
        return str(entry)
    return ", ".join(f"{key} {value}" for key, value in entry.items() if key != "index")


if __name__ == "__main__":
    sys.exit(main())
