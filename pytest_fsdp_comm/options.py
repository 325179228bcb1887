"""Command line, ini and marker, parsed once into frozen values; every usage error lives here."""

from __future__ import annotations

import inspect
import itertools
import math
import os
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import pytest

from pytest_fsdp_comm.comm.links import Links, parse_links
from pytest_fsdp_comm.launch_environment import LaunchedRank, read_launched_rank
from pytest_fsdp_comm.text.paths import anchor_of
from pytest_fsdp_comm.tree.findings.settings import FindingSettings, parse_settings
from pytest_fsdp_comm.upstream import look_up

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

Backend = Literal["gloo", "nccl", "fake"]
Scope = Literal["test", "module"]
Device = Literal["cpu", "cuda"]
UnseenLevel = Literal["error", "warn"]

MARKER_NAME: Final = "distributed"
MARKER_SIGNATURE: Final = (
    "distributed(world_size=None, *, backend=None, ranks=None, scope='test', timeout_s=None, "
    "device=None)"
)
MARKER_ARGUMENTS: Final = {
    "world_size": "how many ranks: a whole number, or a list to parametrize over",
    "backend": "'gloo', 'nccl', or 'fake', which simulates ranks in one process",
    "ranks": "with 'fake', which ranks run, such as [0, 511] (default: 0)",
    "scope": "'test' starts ranks for each test, 'module' keeps them for the next test of the "
    "module with equal settings (default: 'test')",
    "timeout_s": "seconds after which ranks that still run are shown and ended",
    "device": "'cpu' or 'cuda', where dist_info.device and device_mesh are (default: cuda with "
    "nccl, else cpu)",
}
"""The marker's arguments, each with what it does. Those without a default here default to the
command line option, or ini value, of the same meaning."""
WORLD_SIZE_PARAM: Final = "_fsdp_comm_world_size"
"""Name of the fixture that carries a parametrized world size."""

MAX_PROCESSES: Final = 256
"""Largest world size with a process for each rank: beyond it, 200 MB per rank once torch ran (torch
2.13, CPU) outgrow a machine, and a simulation shows the same."""
MAX_SIMULATED: Final = 131_072
"""Largest world size with ``fake``: 16 times the largest mesh that the recorder was measured on."""

DEFAULT_WORLD_SIZE: Final = 2
DEFAULT_TIMEOUT_S: Final = 120.0
DEFAULT_PROGRESS_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings:
    """How one test runs on ranks, after marker, options, ini values and defaults are resolved."""

    world_size: int
    """Ranks of the test's process group; at least 1."""
    backend: Backend
    """The backend of the default process group."""
    ranks: tuple[int, ...]
    """The ranks that really run, ascending: all of them, or the chosen ones with ``fake``."""
    scope: Scope
    """``test``: fresh ranks for each test; ``module``: kept for a module's tests of equal
    settings."""
    timeout_s: float
    """Seconds from the start of the ranks until they are dumped and killed; greater than 0."""
    device: Device | None
    """``cpu``, ``cuda``; None lets the backend decide."""

    @property
    def variant(self) -> str:
        """The part of a snapshot's file name that names the world size, e.g. ``ws4``."""
        return f"ws{self.world_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What command line and ini set, before any marker is looked at."""

    world_size: int
    """World size of tests whose marker names none."""
    backend: Backend | None
    """Backend of tests whose marker names none; None chooses by the GPUs that are visible."""
    timeout_s: float
    """Deadline of tests whose marker names none, in seconds."""
    snapshot_dir: Path
    """Absolute directory of the snapshot files."""
    snapshot_anchor: Path
    """Absolute directory whose tree `snapshot_dir` mirrors: pytest's root directory, or, where
    several projects share a snapshot directory above theirs, the directory that it is in."""
    artifacts_dir: Path | None
    """Absolute directory for what failed comparisons received; None keeps nothing."""
    report_dir: Path | None = None
    """Absolute directory for the HTML report of the run; None writes none."""
    summary_file: Path | None = None
    """Absolute path of the Markdown file that tells the session's outcome; None for none."""
    findings: FindingSettings = field(default_factory=FindingSettings)
    """What counts as a finding of a sharded tree."""
    links: Links = field(default_factory=Links)
    """How fast axes are, for the estimated seconds of a difference."""
    unseen: UnseenLevel = "error"
    """What becomes of a comparison with a recording that lacks something which was sent."""
    progress_s: float = DEFAULT_PROGRESS_S
    """Seconds after which a test that still runs is shown on the terminal."""
    launched: LaunchedRank | None = None
    """This process's rank, if torchrun or the like started it; None if it starts the ranks of its
    tests itself."""
    pdb_rank: int | None = None
    """The rank that debuggers run in; None chooses the lowest of each test."""
    rank_slots: int | None = None
    """Ranks that may live at once in all processes of the session; None sets no limit."""


SETTINGS: Final = pytest.StashKey[DistributedSettings]()
"""On an item's stash: present exactly if the test is distributed."""
OPTIONS: Final = pytest.StashKey[SessionOptions]()
"""On the config's stash, from ``pytest_configure`` on."""


PATH_OPTIONS: Final = ("--comm-artifacts", "--comm-report", "--comm-summary")
"""The command line options that take a path."""

_MAX_PROBLEMS: Final = 20
"""A screen."""


class BadValueError(ValueError):
    """What is wrong with one value; the caller adds where it came from."""


def show_problems(problems: Sequence[str]) -> str:
    """Usage errors under one headline, each on a line; one alone needs none.

    Args:
        problems: At least one.
    """
    if len(problems) == 1:
        return problems[0]
    more = len(problems) - _MAX_PROBLEMS
    return "\n".join(
        (
            f"{len(problems)} usage errors of pytest-fsdp-comm:",
            *(f"  {problem}" for problem in problems[:_MAX_PROBLEMS]),
            *([f"  and {more} more"] if more > 0 else []),
        )
    )


def add_options(parser: pytest.Parser) -> None:
    """Registers the command line options and ini values."""
    # No defaults here: a default on the command line would hide the ini value.
    group = parser.getgroup("fsdp-comm", "communication regression tests (pytest-fsdp-comm)")
    group.addoption(
        "--world-size",
        metavar="N",
        help="ranks for distributed tests whose marker names no world size "
        f"(ini: fsdp_comm_world_size; default {DEFAULT_WORLD_SIZE})",
    )
    group.addoption(
        "--comm-backend",
        metavar="NAME",
        help="backend for tests whose marker names none: gloo, nccl or fake (simulated in one "
        "process) (ini: fsdp_comm_backend; default: nccl with enough GPUs, else gloo)",
    )
    group.addoption(
        "--comm-timeout",
        metavar="SECONDS",
        help="deadline of a distributed test whose marker names none "
        f"(ini: fsdp_comm_timeout_s; default {DEFAULT_TIMEOUT_S:.0f})",
    )
    group.addoption(
        "--rank-slots",
        metavar="N",
        help="run at most N ranks at once across all xdist workers: a test waits until there is "
        "room for its ranks (ini: fsdp_comm_rank_slots; default: no limit)",
    )
    group.addoption(
        "--comm-artifacts",
        metavar="DIR",
        help="keep what failed comparisons received and expected, and their stories, in DIR; "
        "`fsdp-comm accept DIR` accepts them",
    )
    group.addoption(
        "--comm-report",
        metavar="DIR",
        help="write an HTML report of the run to DIR/index.html: what each test sent, gathered and "
        "sharded, and how that differs from its snapshots",
    )
    group.addoption(
        "--pdb-rank",
        metavar="N",
        help="the rank in which --pdb, --trace and breakpoint() debug a distributed test "
        "(default: the lowest that runs)",
    )
    group.addoption(
        "--comm-summary",
        metavar="FILE",
        help="write what differs from the snapshots, and what that costs, to FILE as Markdown (on "
        "GitHub, the summary of the step has it without this option)",
    )
    parser.addini("fsdp_comm_world_size", "default for --world-size", default="")
    parser.addini("fsdp_comm_backend", "default for --comm-backend", default="")
    parser.addini("fsdp_comm_timeout_s", "default for --comm-timeout, in seconds", default="")
    parser.addini(
        "fsdp_comm_progress_s",
        "report on the terminal where the ranks of a test are if it still runs after this many "
        "seconds, and again each time the elapsed time has doubled (default: "
        f"{DEFAULT_PROGRESS_S:.0f})",
        default="",
    )
    parser.addini(
        "fsdp_comm_unseen",
        "error: a recording that lacks something which was sent is compared with no snapshot; "
        "warn: it is, with a warning (default: error)",
        default="",
    )
    parser.addini("fsdp_comm_rank_slots", "default for --rank-slots", default="")
    parser.addini(
        "fsdp_comm_snapshot_dir",
        "directory of the communication snapshots, relative to the root directory (default: "
        "snapshots)",
        default="snapshots",
    )
    parser.addini(
        "fsdp_comm_findings",
        "levels and thresholds of fsdp_tree's findings, one per line: 'split-tie = off', "
        "'small_nbytes = 4096' (default: those of docs/fsdp-tree.md)",
        type="linelist",
    )
    parser.addini(
        "fsdp_comm_links",
        "bandwidth and latency of mesh axes, one per line: 'dp: 50 GB/s 10 us', or '*' for all "
        "others; differences are then estimated in seconds (default: none)",
        type="linelist",
    )


def join_paths(arguments: Iterable[str]) -> list[str]:
    """The arguments, with each of our options that takes a path and its value as one word."""
    words = iter(arguments)
    return [
        f"{word}={value}" if (value := word in PATH_OPTIONS and next(words, None)) else word
        for word in words
    ]


def refuse_moved_root(config: pytest.Config, parser: pytest.Parser) -> None:
    """Checks that no path of ours has moved pytest's root directory.

    pytest chooses it before it knows a plugin's options (8.4 to 9.2): a value that is a word of its
    own, and exists, is to it a path of tests.

    Args:
        config: The session's, before any conftest is loaded.
        parser: Of the command line, with the options of all plugins.

    Raises:
        pytest.UsageError: One has; the text says how to write it.
    """
    given = shlex.split(os.environ.get("PYTEST_ADDOPTS", ""))
    given += map(str, config.invocation_params.args)
    # Those have one argument a line. A worker of xdist has the environment, but maybe not the file.
    files = [Path(word[1:]) for word in given if word.startswith("@")]
    lines = [file.read_text(encoding="utf-8").splitlines() for file in files if file.is_file()]
    words = itertools.chain.from_iterable(map(itertools.pairwise, [given, *lines]))
    separate = [pair for pair in words if pair[0] in PATH_OPTIONS]
    if not separate:
        return
    known = parser.parse_known_args(given)
    if known.help or known.version:
        return
    determine_setup = look_up(
        "pytest", "_pytest.config.findpaths", "determine_setup", "the check of paths relies on"
    )
    overrides = "override_ini" in inspect.signature(determine_setup).parameters  # since 9.0

    def choose_root(paths: list[str]) -> tuple[Path, Path | None]:
        root, inifile, *_ = determine_setup(
            inifile=known.inifilename,
            args=paths,
            rootdir_cmd_arg=known.rootdir,
            invocation_dir=config.invocation_params.dir,
            **({"override_ini": None} if overrides else {}),
        )
        return root, inifile

    wanted = choose_root(known.file_or_dir)
    values = [value for _, value in separate]
    # What moved it may also be an option of another plugin.
    if wanted in {choose_root([*known.file_or_dir, *values]), (config.rootpath, config.inipath)}:
        return

    def describe_root(root: Path, inifile: Path | None) -> str:
        return f"{root} with {inifile.name}" if inifile else str(root)

    raise pytest.UsageError(
        f"{shlex.join(itertools.chain(*separate))}: pytest chooses its root directory before it "
        f"knows a plugin's options, and took {shlex.join(values)} for a place of tests: the root "
        f"directory became {describe_root(config.rootpath, config.inipath)} instead of "
        f"{describe_root(*wanted)}; write "
        f"{' '.join(f'{flag}={shlex.quote(value)}' for flag, value in separate)}"
    )


def read_session_options(config: pytest.Config) -> SessionOptions:
    """Parses command line and ini.

    Raises:
        pytest.UsageError: Values are ill-typed or out of range; the text says where each came from.
    """
    problems: list[str] = []

    def attempt(where: str, parse: Callable[[Any], Any], given: Any, default: Any) -> Any:
        try:
            return parse(given)
        except (ValueError, pytest.UsageError) as problem:
            problems.append(f"{where}{problem}")
            return default

    def read(flag: str, ini: str, parse: Callable[[str], Any], default: Any) -> Any:
        given = config.getoption(flag) if flag else None
        text, where = (given, flag) if given is not None else (config.getini(ini), f"ini {ini}")
        if given is None and not text:
            return default
        return attempt(f"{where}: ", parse, text, default)

    findings = attempt("ini ", parse_settings, config.getini("fsdp_comm_findings"), None)
    links = attempt("ini ", parse_links, config.getini("fsdp_comm_links"), None)
    artifacts = config.getoption("--comm-artifacts")
    report = config.getoption("--comm-report")
    summary = config.getoption("--comm-summary")
    snapshot_dir = attempt("", _read_snapshot_dir, config, config.rootpath)
    launched = attempt("", _read_launch, config, None)
    world_size = read("--world-size", "fsdp_comm_world_size", parse_world_size, DEFAULT_WORLD_SIZE)
    if launched and config.getoption("--world-size") is None:
        # The ini value is the project's default; what was launched is what was asked for now.
        world_size = launched.world_size
    if artifacts:
        attempt(
            "--comm-artifacts: ", _check_artifacts, config.invocation_params.dir / artifacts, None
        )
    options = SessionOptions(
        world_size=world_size,
        backend=read("--comm-backend", "fsdp_comm_backend", parse_backend, None),
        timeout_s=read("--comm-timeout", "fsdp_comm_timeout_s", parse_timeout_s, DEFAULT_TIMEOUT_S),
        snapshot_dir=snapshot_dir,
        snapshot_anchor=anchor_of(snapshot_dir, config.rootpath),
        # Relative to where the user typed it, as with --junitxml.
        artifacts_dir=config.invocation_params.dir / artifacts if artifacts else None,
        report_dir=config.invocation_params.dir / report if report else None,
        summary_file=config.invocation_params.dir / summary if summary else None,
        findings=findings,
        links=links,
        unseen=read("", "fsdp_comm_unseen", _parse_unseen, "error"),
        progress_s=read("", "fsdp_comm_progress_s", parse_timeout_s, DEFAULT_PROGRESS_S),
        launched=launched,
        pdb_rank=attempt("", _read_pdb_rank, config, None),
        rank_slots=read("--rank-slots", "fsdp_comm_rank_slots", parse_rank_slots, None),
    )
    if problems:
        raise pytest.UsageError(show_problems(problems))
    return options


def _check_artifacts(directory: Path) -> None:
    """Refuses a directory that cannot be made, before what differs would be lost for it."""
    found = next(path for path in (directory, *directory.parents) if path.exists())
    if not found.is_dir():
        raise BadValueError(
            f"expected a directory for what failed comparisons received, but {found} is a file; "
            "choose a directory that can be made and written"
        )


def _parse_unseen(text: str) -> str:
    if text not in get_args(UnseenLevel):
        raise BadValueError(f"expected one of {', '.join(get_args(UnseenLevel))}, got {text!r}")
    return text


def _read_launch(config: pytest.Config) -> LaunchedRank | None:
    launched = read_launched_rank(os.environ)
    processes = config.getoption("numprocesses", default=None)
    if launched and processes:
        raise pytest.UsageError(
            f"-n {processes}: pytest-xdist would start more processes in each of the "
            f"{launched.world_size} that {launched.launcher} started, which are themselves the "
            "ranks: leave out -n, or run pytest -n without a launcher"
        )
    return launched


def _read_snapshot_dir(config: pytest.Config) -> Path:
    # Without "..", by which two names of one directory would differ; a link's is its target's.
    given = Path(config.getini("fsdp_comm_snapshot_dir"))
    root = config.rootpath.resolve() if ".." in given.parts else config.rootpath
    directory = Path(os.path.normpath(root / given))
    foreign = getattr(config.option, "snapshot_dirname", "")
    if foreign in directory.parts:
        raise pytest.UsageError(
            f"ini fsdp_comm_snapshot_dir: {foreign!r} is where syrupy keeps the files of plain "
            "`snapshot` assertions and deletes files that it does not know; choose another "
            "directory, e.g. 'snapshots'"
        )
    return directory


def _read_pdb_rank(config: pytest.Config) -> int | None:
    given = config.getoption("--pdb-rank")
    if given is None:
        return None
    number = parse_whole_number(given)
    if number is None or number < 0:
        raise pytest.UsageError(f"--pdb-rank: expected a rank, 0 or greater, got {given!r}")
    if config.getoption("dist", "no") != "no":
        # As xdist words it for --pdb.
        raise pytest.UsageError(
            "--pdb-rank is incompatible with distributing tests; try using -n0 or -nno"
        )
    return number


def describe(options: SessionOptions) -> str:
    """The line of the report header."""
    backend = options.backend or "nccl with enough GPUs, else gloo"
    launched = options.launched
    rank = ""
    if launched:
        rank = f", rank {launched.rank} of {launched.world_size} started by {launched.launcher}"
    slots = "" if options.rank_slots is None else f", at most {options.rank_slots} ranks at once"
    return f"fsdp-comm: world size {options.world_size}, backend {backend}{rank}{slots}"


def parse_world_size(value: object) -> int:
    """A number of ranks, given as an int or in decimal.

    Raises:
        BadValueError: It is something else; the text says what was expected and what came.
    """
    number = parse_whole_number(value)
    if number is None or number < 1 or number > MAX_SIMULATED:
        raise BadValueError(
            f"expected a whole number of ranks from 1 to {MAX_PROCESSES} "
            f"(to {MAX_SIMULATED} with the fake backend), got {value!r}"
        )
    return number


def parse_whole_number(value: object) -> int | None:
    """An int, or a decimal text, as an int; None for anything else, bools included."""
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*-?[0-9]+\s*", value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def parse_rank_slots(value: object) -> int:
    """How many ranks may live at once, in decimal.

    Raises:
        BadValueError: It is something else; the text says what was expected and what came.
    """
    number = parse_whole_number(value)
    if number is None or number < 1:
        raise BadValueError(f"expected a whole number of ranks, at least 1, got {value!r}")
    return number


def parse_backend(value: object) -> Backend:
    """The name of a backend.

    Raises:
        BadValueError: It is something else; the text says what was expected and what came.
    """
    for name in get_args(Backend):
        if value == name:
            return name  # type: ignore[no-any-return]  # get_args is untyped
    raise BadValueError(
        f"unknown backend {value!r}; expected one of {', '.join(get_args(Backend))}"
    )


def parse_timeout_s(value: object) -> float:
    """A deadline in seconds, greater than 0 and finite.

    Raises:
        BadValueError: It is something else; the text says what was expected and what came.
    """
    try:
        seconds = float(value)  # type: ignore[arg-type]  # what float() rejects is reported below
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not seconds > 0 or math.isinf(seconds):
        raise BadValueError(f"expected a positive number of seconds, got {value!r}")
    return seconds
