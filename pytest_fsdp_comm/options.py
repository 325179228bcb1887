"""Declare and parse all settings: command line options, ini values and marker arguments."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import pytest

from pytest_fsdp_comm.launch_environment import MAX_SIMULATED, LaunchedRank, read_launched_rank
from pytest_fsdp_comm.text.files import EXPECTED, RECEIVED, is_nested
from pytest_fsdp_comm.text.words import show_path

if TYPE_CHECKING:
    from pytest_fsdp_comm.tree.finding import FindingSettings  # importing it takes 6 ms

Backend = Literal["gloo", "nccl", "fake"]
Scope = Literal["test", "module"]
Device = Literal["cpu", "cuda"]
Simulation = Literal["", "answering", "strict"]
Start = Literal["auto", "fork", "spawn"]

MARKER_NAME: Final = "distributed"
MARKER_SIGNATURE: Final = (
    "distributed(world_size=None, *, backend=None, simulate=False, simulation_splits=None, "
    "real=None, ranks=None, scope='test', timeout_s=None, device=None)"
)
# Name of the fixture through which a test is parametrized over world sizes.
WORLD_SIZE_PARAM: Final = "_fsdp_comm_world_size"

# Largest world size with a process for each rank. A process needs 200 MB for torch (2.13, CPU), so
# one machine cannot run more. For larger world sizes, a simulation records the same rows.
MAX_PROCESSES: Final = 256


class BadValueError(ValueError):
    """A setting has an invalid value; the caller adds which option, ini value or test set it."""


def parse_whole_number(value: object, *, expected: str, least: int, most: float = math.inf) -> int:
    """Parse an int (not a bool) or a decimal string within a range, or raise BadValueError."""
    number = value
    if isinstance(value, str) and re.fullmatch(r"\s*-?[0-9]+\s*", value):
        number = int(value)
    if not isinstance(number, int) or isinstance(number, bool) or not least <= number <= most:
        raise BadValueError(f"expected {expected}, got {value!r}")
    return number


parse_world_size = partial(
    parse_whole_number,
    expected=f"a whole number of ranks from 1 to {MAX_PROCESSES} (to {MAX_SIMULATED} with the fake "
    "backend)",
    least=1,
    most=MAX_SIMULATED,
)


def parse_timeout_s(value: object) -> float:
    """Parse a positive, finite number of seconds, or raise BadValueError."""
    try:
        seconds = float(value)  # type: ignore[arg-type]  # what float() rejects is reported below
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise BadValueError(f"expected a positive number of seconds, got {value!r}")
    return seconds


def parse_choice(value: Any, *, allowed: Sequence[Any]) -> Any:
    """Return the value if it is allowed, or raise BadValueError."""
    if value not in allowed:
        raise BadValueError(f"expected one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def parse_simulate(value: object) -> bool | int | str:
    """Parse a bool, ``strict`` or the smallest world size to simulate, or raise BadValueError."""
    if isinstance(value, bool) or value == "strict":
        return value
    return parse_whole_number(
        value, expected="True, False, 'strict' or a world size of at least 1", least=1
    )


def parse_splits(value: object) -> tuple[float, ...]:
    """Parse each expert's share of the tokens (empty for ``even``), or raise BadValueError."""
    if value == "even":
        return ()
    shares = value if isinstance(value, (list, tuple)) else ()
    is_number = all(type(share) in {int, float} and 0 <= share < math.inf for share in shares)
    if not is_number or not sum(shares):
        raise BadValueError(
            f"expected 'even', or each expert's share as a list such as [4, 2, 1, 1], got {value!r}"
        )
    return tuple(map(float, shares))


def parse_real(value: object) -> dict[str, tuple[int, ...]]:
    """Parse ``{axis: size}`` or ``{axis: (size, stride)}`` into tuples, or raise BadValueError."""
    raw_axes = value if isinstance(value, dict) else {}
    axes = {name: size if isinstance(size, tuple) else (size,) for name, size in raw_axes.items()}
    are_whole = all(type(number) is int and number > 0 for axis in axes.values() for number in axis)
    if not (axes and are_whole and all(axis >= (2,) and not axis[2:] for axis in axes.values())):
        raise BadValueError(
            "expected each axis with its size, at least 2, such as {'pp': 4}, or with its size and "
            f"stride, such as {{'ep': (8, 1)}}, got {value!r}"
        )
    return axes


def _parse_finding_settings(lines: Sequence[str]) -> FindingSettings:
    from pytest_fsdp_comm.tree.findings.rules import parse_settings  # noqa: PLC0415  # few sessions need them

    return parse_settings(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The settings of a session, from the command line and ini file; `DECLARED` describes them."""

    launched: LaunchedRank | None = None
    """This process's rank if a launcher started it; None if pytest starts the ranks."""
    world_size: int = 2
    backend: Backend | None = None
    timeout_s: float = 120.0
    rank_slots: int | None = None
    start: Start = "auto"
    artifacts_dir: Path | None = None
    report_dir: Path | None = None
    pdb_rank: int | None = None
    summary_file: Path | None = None
    progress_s: float = 30.0
    snapshot_dir: Path = Path("snapshots")
    findings: FindingSettings | None = None


_DEFAULTS: Final = {entry.name: entry.default for entry in fields(SessionOptions)}


class Setting(NamedTuple):
    """A field of `SessionOptions`, an argument of the marker, or both."""

    name: str
    """Name of the field and of the argument; the ini name adds the prefix ``fsdp_comm_``."""
    parse: Callable[[Any], Any]
    """Parses a value from the command line, the ini file or the marker; may raise ValueError."""
    text: str = ""
    """Help text of the option and the ini value, for ``--help`` and docs/reference/options.md."""
    default: str = ""
    """The default in words, for help texts; needed only if it is None in `SessionOptions`."""
    flag: str = ""
    """The option with its metavar, ``--comm-report=DIR``; empty if the setting has no option."""
    ini: Literal["", "string", "linelist"] = ""
    """Type of the ini value; empty if the setting has no ini value."""
    argument: str = ""
    """Help text of the marker's argument; empty if the marker has no such argument."""
    writes: tuple[str, ...] = ()
    """Files and directories below the option's path that a session writes or deletes."""

    @property
    def ini_name(self) -> str:
        return f"fsdp_comm_{self.name}" if self.ini else ""

    @property
    def option(self) -> str:
        """The flag without its metavar: ``--comm-report``."""
        return self.flag.partition("=")[0]

    @property
    def is_path(self) -> bool:
        return self.flag.endswith(("=DIR", "=FILE"))

    @property
    def default_text(self) -> str:
        """The default as printed in the help text; empty if the help text mentions no default."""
        value = _DEFAULTS.get(self.name)
        return self.default or ("" if value is None else f"{value}".removesuffix(".0"))


# The only list of settings: we register and parse options, ini values and marker arguments from it,
# and docs/settings_table.py writes docs/reference/options.md from it. ``pytest --markers`` lists
# arguments in this order.
DECLARED: Final = (
    Setting(
        "world_size",
        parse_world_size,
        "number of ranks for tests whose marker sets none",
        flag="--world-size=N",
        ini="string",
        argument="number of ranks, or a list of numbers to parametrize over",
    ),
    Setting(
        "backend",
        partial(parse_choice, allowed=get_args(Backend)),
        "backend for tests whose marker sets none: gloo, nccl or fake (simulated in one process)",
        "nccl with enough GPUs, else gloo",
        flag="--comm-backend=NAME",
        ini="string",
        argument="'gloo', 'nccl' or 'fake' (simulated in one process)",
    ),
    Setting(
        "simulate",
        parse_simulate,
        argument="True: simulate the ranks, with tensors that have no memory; a number: simulate "
        "only world sizes of at least this number; 'strict': as True, but reading an unknown value "
        "is an error",
    ),
    Setting(
        "simulation_splits",
        parse_splits,
        argument="how a simulated router distributes tokens: 'even', or each expert's share as a "
        "list, such as [4, 2, 1, 1] (default: reading the router's choice is an error)",
    ),
    Setting(
        "real",
        parse_real,
        argument="mesh axes along which a simulation runs a process for each coordinate: {'pp': 4} "
        "for the outermost axis; for others, size and stride: {'ep': (8, 1)}",
    ),
    Setting(
        "ranks",
        lambda ranks: ranks,  # checked later: valid ranks depend on other arguments
        argument="ranks to run with backend 'fake' or in a simulation, such as [0, 511], or 'all' "
        "(default: 0; a simulation adds one rank for each further set of local shapes)",
    ),
    Setting(
        "scope",
        partial(parse_choice, allowed=get_args(Scope)),
        argument="'test': start ranks for each test; 'module': reuse them for the next test of the "
        "module with equal settings (default: 'test')",
    ),
    Setting(
        "timeout_s",
        parse_timeout_s,
        "deadline of a distributed test whose marker sets none",
        flag="--comm-timeout=SECONDS",
        ini="string",
        argument="seconds after which the plugin reports and ends ranks that still run",
    ),
    Setting(
        "device",
        partial(parse_choice, allowed=get_args(Device)),
        argument="'cpu' or 'cuda', for dist_info.device and device_mesh (default: cuda with nccl, "
        "else cpu)",
    ),
    Setting(
        "rank_slots",
        partial(parse_whole_number, expected="a whole number of ranks, at least 1", least=1),
        "run at most N ranks at once across all xdist workers; a test waits until its ranks fit",
        "no limit",
        flag="--rank-slots=N",
        ini="string",
    ),
    Setting(
        "start",
        partial(parse_choice, allowed=get_args(Start)),
        "fork: fork ranks, which is fast; spawn: start each rank as a new pytest process, which "
        "takes seconds per test; auto: fork, unless collection started threads, CUDA or a process "
        "group",
        flag="--comm-start=HOW",
        ini="string",
    ),
    Setting(
        "artifacts_dir",
        Path,
        "write the received and the expected files of failed comparisons to DIR, for `fsdp-comm "
        "accept DIR`",
        flag="--comm-artifacts=DIR",
        writes=(RECEIVED, EXPECTED),
    ),
    Setting(
        "report_dir",
        Path,
        "write an HTML report to DIR/index.html, or to a single file if DIR ends with .html: the "
        "communication and sharding of each test, and differences from its snapshots",
        flag="--comm-report=DIR",
        writes=("index.html", "tests"),
    ),
    Setting(
        "pdb_rank",
        partial(parse_whole_number, expected="a rank, 0 or greater", least=0),
        "rank to debug with --pdb, --trace and breakpoint()",
        "the lowest rank that runs",
        flag="--pdb-rank=N",
    ),
    Setting(
        "summary_file",
        Path,
        "write differences from snapshots, and their cost, to FILE as Markdown (GitHub's step "
        "summary has them without this option)",
        flag="--comm-summary=FILE",
        writes=("",),
    ),
    Setting(
        "progress_s",
        parse_timeout_s,
        "seconds after which pytest prints where the ranks of a running test are; it prints again "
        "whenever the elapsed time has doubled",
        ini="string",
    ),
    Setting(
        "snapshot_dir", Path, "directory of snapshots, relative to pytest's rootdir", ini="string"
    ),
    Setting(
        "findings",
        _parse_finding_settings,
        "levels and thresholds of fsdp_tree's findings, one per line: 'split-tie = off', "
        "'small_nbytes = 4096'",
        "those of docs/fsdp-tree.md",
        ini="linelist",
    ),
)
# The marker's arguments, keyed by name, in the order of the marker's signature.
MARKER_ARGUMENTS: Final = {setting.name: setting for setting in DECLARED if setting.argument}
PATH_OPTIONS: Final = tuple(setting.option for setting in DECLARED if setting.is_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealAxis:
    """A mesh axis along which a simulation runs one process for each coordinate."""

    name: str
    size: int
    stride: int
    """Distance between ranks at consecutive coordinates."""


def ranks_along(axes: Iterable[RealAxis], ranks: Iterable[int]) -> tuple[int, ...]:
    """Return `ranks`, and all ranks whose coordinates differ from theirs only on `axes`, sorted."""
    selected = {*ranks}
    for axis in axes:
        selected = {
            rank + (coordinate - rank // axis.stride % axis.size) * axis.stride
            for rank in selected
            for coordinate in range(axis.size)
        }
    return tuple(sorted(selected))


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings:
    """How one test runs on ranks, resolved from its marker, options, ini values and defaults."""

    world_size: int
    """Size of the test's default process group; at least 1."""
    backend: Backend
    ranks: tuple[int, ...]
    """Ranks that run, ascending: all ranks, or the selected ranks if the backend is ``fake``."""
    scope: Scope
    """``test``: each test gets new ranks; ``module``: tests with equal settings share ranks."""
    timeout_s: float
    """Seconds from the start of the ranks to the hang report; greater than 0."""
    device: Device | None
    """The device that the marker sets; None if the backend decides."""
    simulation: Simulation = ""
    """Reading an unknown value returns an assumed value (``answering``) or raises (``strict``).
    Empty if the test is not simulated."""
    simulation_splits: tuple[float, ...] | None = None
    """Each expert's share of the tokens; empty if all are equal, None if the marker sets none."""
    real: tuple[RealAxis, ...] = ()
    """Mesh axes along which a simulation runs one process for each coordinate."""
    adds_distinct_ranks: bool = False
    """Whether the simulation also runs ranks whose local shapes differ from those of `ranks`."""


# Item stash key for the resolved settings of a test; missing if the test is not distributed.
SETTINGS: Final = pytest.StashKey[DistributedSettings]()
# Item stash key for pytest-timeout's limit; set only if the limit applies to the complete test.
PLUGIN_TIMEOUT_S: Final = pytest.StashKey[float]()
# Config stash key for the options of the session; set by `pytest_configure`.
OPTIONS: Final = pytest.StashKey[SessionOptions]()
# Config stash key for this process's `run_report.Notes`; set only if an HTML report is requested.
OBSERVER: Final = pytest.StashKey[Any]()


def show_problems(problems: Sequence[str]) -> str:
    """Join usage errors, one per line, under a headline; a single error needs no headline."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join((f"{len(problems)} usage errors of pytest-fsdp-comm:", *problems))


def add_options(parser: pytest.Parser) -> None:
    """Register the command line options and ini values."""
    group = parser.getgroup("fsdp-comm", "communication regression tests (pytest-fsdp-comm)")
    for setting in DECLARED:
        flag, ini, default = setting.option, setting.ini_name, setting.default_text
        remarks = [f"ini: {ini}"] if flag and ini else []
        remarks += [f"default: {default}"] if default else []
        help_text = f"{setting.text} ({'; '.join(remarks)})" if remarks else setting.text
        if flag:
            # Set no default here, because it would hide the ini value.
            group.addoption(flag, metavar=setting.flag.partition("=")[2], help=help_text)
        if setting.ini:
            unit = ", in seconds" if flag and setting.name.endswith("_s") else ""
            text = f"default for {flag}{unit}" if flag else help_text
            parser.addini(ini, text, type=setting.ini)


def find_first_page(report: Path) -> Path:
    """Return the page to open of a report, which is a file ``.html`` or a directory."""
    return report if report.suffix == ".html" else report / "index.html"


def join_paths(arguments: Iterable[str]) -> list[str]:
    """Join each of this plugin's path options with its value: ``--comm-report=DIR``."""
    # pytest chooses its root directory before plugins register their options, and mistakes an
    # existing path that is passed as a separate argument for a test path.
    remaining = iter(arguments)
    return [
        f"{argument}={path}"
        if (path := argument in PATH_OPTIONS and next(remaining, None))
        else argument
        for argument in remaining
    ]


def read_session_options(config: pytest.Config) -> SessionOptions:
    """Parse command line and ini values, or raise a usage error that lists all invalid values."""
    problems: list[str] = []

    def parse_or_note(where: str, parse: Callable[[Any], Any], raw_value: Any) -> Any:
        try:
            return parse(raw_value)
        except (ValueError, pytest.UsageError) as problem:
            problems.append(f"{where}{problem}")
            return None

    values: dict[str, Any] = {}
    for setting in DECLARED:
        where, raw_value = _read_raw_value_and_source(config, setting)
        if raw_value is not None:
            values[setting.name] = parse_or_note(where, setting.parse, raw_value)
    launched = parse_or_note("", _read_launch_refusing_xdist, config)
    if launched and config.getoption("--world-size") is None:
        # The launcher's world size describes this run, so it overrides the ini value, which is only
        # the project's default.
        values["world_size"] = launched.world_size
    if values.get("pdb_rank") is not None and config.getoption("dist", "no") != "no":
        # Use the same words as xdist's error for --pdb.
        problems.append("--pdb-rank is incompatible with distributing tests; try using -n0 or -nno")
    path = values.get("snapshot_dir", _DEFAULTS["snapshot_dir"])
    directory = parse_or_note(
        "ini fsdp_comm_snapshot_dir: ", partial(_resolve_snapshot_dir, config), path
    )
    problems += _find_options_overwriting_snapshots(config, values, directory) if directory else []
    if problems:
        raise pytest.UsageError(show_problems(problems))
    values |= {"snapshot_dir": directory, "launched": launched}
    return SessionOptions(**values)


def _read_raw_value_and_source(config: pytest.Config, setting: Setting) -> tuple[str, Any]:
    """Return a prefix for errors, and the option or ini value (None if neither is set)."""
    raw_value = config.getoption(setting.option) if setting.flag else None
    if setting.is_path:
        # Resolve the path against the directory in which the user ran pytest, like --junitxml.
        raw_value = config.invocation_params.dir / raw_value if raw_value else None
    if raw_value is not None or not setting.ini:
        return f"{setting.option}: ", raw_value
    # Errors from the parser of a linelist already contain the ini name.
    where = "ini " if setting.ini == "linelist" else f"ini {setting.ini_name}: "
    return where, config.getini(setting.ini_name) or None


def _read_launch_refusing_xdist(config: pytest.Config) -> LaunchedRank | None:
    launched = read_launched_rank(os.environ)
    processes = config.getoption("numprocesses", default=None)
    if launched and processes:
        raise pytest.UsageError(
            f"-n {processes}: pytest-xdist would start workers in each of the "
            f"{launched.world_size} processes that {launched.launcher} started as ranks: leave out "
            "-n, or run pytest -n without a launcher"
        )
    return launched


def _resolve_snapshot_dir(config: pytest.Config, path: Path) -> Path:
    # Normalize "..", so that a directory has one name. Resolve symlinks first: "link/.." is the
    # parent of the link's target.
    root = config.rootpath.resolve() if ".." in path.parts else config.rootpath
    directory = Path(os.path.normpath(root / path))
    syrupy_dir = getattr(config.option, "snapshot_dirname", "")
    if syrupy_dir in directory.parts:
        raise pytest.UsageError(
            f"syrupy stores plain `snapshot` assertions in {syrupy_dir!r} and deletes other files "
            "there; choose a different directory, e.g. 'snapshots'"
        )
    return directory


def _find_options_overwriting_snapshots(
    config: pytest.Config, values: Mapping[str, Any], snapshot_dir: Path
) -> Iterator[str]:
    """Yield an error for each option whose files could replace reviewed snapshots."""
    syrupy_dir = getattr(config.option, "snapshot_dirname", "")
    for setting in DECLARED:
        for name in setting.writes if values.get(setting.name) else ():
            path = values[setting.name] / name
            if setting.flag.endswith("=FILE") and path.is_dir():
                continue  # cannot be written, which the session reports when it ends
            if is_nested(path, snapshot_dir):
                other = f"the snapshot directory {show_path(snapshot_dir, config.rootpath)}"
            elif syrupy_dir in Path(os.path.realpath(path)).parts:
                other = f"a directory {syrupy_dir!r} of plain snapshots"
            else:
                continue
            yield (
                f"{setting.option}: this option writes {show_path(path)}, which overlaps with "
                f"{other}, so reviewed snapshots could be lost; choose a different path"
            )
            break


def describe(options: SessionOptions) -> str:
    """Return the line for pytest's header."""
    backend = options.backend or "nccl with enough GPUs, else gloo"
    text = f"fsdp-comm: world size {options.world_size} unless a test sets one, backend {backend}"
    if launched := options.launched:
        text += f", rank {launched.rank} of {launched.world_size} started by {launched.launcher}"
    if options.start != "auto" and not options.launched:
        text += f", ranks are {'forked' if options.start == 'fork' else 'new processes'}"
    if options.rank_slots is not None:
        text += f", at most {options.rank_slots} ranks at once"
    return text
