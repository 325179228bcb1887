"""Command line, ini and marker in one table: each setting is declared once, and parsed once."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

import pytest

from pytest_fsdp_comm.launch_environment import MAX_SIMULATED, LaunchedRank, read_launched_rank

if TYPE_CHECKING:
    from pytest_fsdp_comm.tree.finding import FindingSettings  # costs 6 ms

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
# Name of the fixture that carries a parametrized world size.
WORLD_SIZE_PARAM: Final = "_fsdp_comm_world_size"

# Largest world size with a process for each rank: beyond it, 200 MB per rank once torch ran (torch
# 2.13, CPU) outgrow a machine, and a simulation shows the same.
MAX_PROCESSES: Final = 256


class BadValueError(ValueError):
    """What is wrong with one value; the caller adds where it came from."""


def parse_whole_number(value: object, *, expected: str, least: int, most: float = math.inf) -> int:
    """Parse an int, or a decimal text, in a range; BadValueError for others, and for bools."""
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
    """Parse a deadline in seconds, greater than 0 and finite; BadValueError for others."""
    try:
        seconds = float(value)  # type: ignore[arg-type]  # what float() rejects is reported below
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise BadValueError(f"expected a positive number of seconds, got {value!r}")
    return seconds


def parse_choice(value: Any, *, allowed: Sequence[Any]) -> Any:
    """Return a value that is one of a few; BadValueError for others."""
    if value not in allowed:
        raise BadValueError(f"expected one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def parse_simulate(value: object) -> bool | int | str:
    """Parse whether to simulate, or from which world size on; BadValueError for others."""
    if isinstance(value, bool) or value == "strict":
        return value
    return parse_whole_number(
        value, expected="True, False, 'strict' or a world size of at least 1", least=1
    )


def parse_splits(value: object) -> tuple[float, ...]:
    """Parse the shares of experts, empty if they are equal; BadValueError for others."""
    if value == "even":
        return ()
    shares = value if isinstance(value, (list, tuple)) else ()
    is_number = all(type(own) in {int, float} and 0 <= own < math.inf for own in shares)
    if not is_number or not sum(shares):
        raise BadValueError(
            f"expected 'even', or each expert's share as a list such as [4, 2, 1, 1], got {value!r}"
        )
    return tuple(map(float, shares))


def parse_real(value: object) -> dict[str, tuple[int, ...]]:
    """Parse axes with their size, and the stride if it is given; BadValueError for others."""
    axes = value if isinstance(value, dict) else {}
    found = {name: own if isinstance(own, tuple) else (own,) for name, own in axes.items()}
    are_whole = all(type(number) is int and number > 0 for own in found.values() for number in own)
    if not (found and are_whole and all(own >= (2,) and not own[2:] for own in found.values())):
        raise BadValueError(
            "expected axes with their sizes, of at least 2, such as {'pp': 4}, or with size and "
            f"stride, such as {{'ep': (8, 1)}}, got {value!r}"
        )
    return found


def _parse_findings(lines: Sequence[str]) -> FindingSettings:
    from pytest_fsdp_comm.tree.findings.rules import parse_settings  # noqa: PLC0415  # few sessions need them

    return parse_settings(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What command line and ini set, before any marker is looked at: see `DECLARED`."""

    launched: LaunchedRank | None = None
    """This process's rank, if torchrun or the like started it; None if it starts ranks itself."""
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
    """Of the field and of the argument; the ini value is ``fsdp_comm_`` and this name."""
    parse: Callable[[Any], Any]
    """Makes the value of a text, lines, an absolute path or an argument; raises ValueError."""
    text: str = ""
    """What option and ini value do, for ``--help`` and docs/reference/options.md."""
    default: str = ""
    """How the default is shown where `SessionOptions` has None."""
    flag: str = ""
    """The option, which wins over the ini value, with what it calls its value; maybe empty."""
    ini: Literal["", "string", "linelist"] = ""
    """The type of the ini value; empty if there is none."""
    argument: str = ""
    """What the marker's argument does; empty if there is none."""

    @property
    def ini_name(self) -> str:
        return f"fsdp_comm_{self.name}" if self.ini else ""

    @property
    def option(self) -> str:
        """``--comm-report`` of ``--comm-report=DIR``."""
        return self.flag.partition("=")[0]

    @property
    def is_path(self) -> bool:
        return self.flag.endswith(("=DIR", "=FILE"))

    @property
    def shown_default(self) -> str:
        """Empty if the default is not worth a word."""
        value = _DEFAULTS.get(self.name)
        return self.default or ("" if value is None else f"{value}".removesuffix(".0"))


# From this table come the options, ini values and arguments that pytest knows, the parsing of what
# is given, and docs/reference/options.md. The marker lists its arguments in this order.
DECLARED: Final = (
    Setting(
        "world_size",
        parse_world_size,
        "ranks for distributed tests whose marker names no world size",
        flag="--world-size=N",
        ini="string",
        argument="how many ranks: a whole number, or a list to parametrize over",
    ),
    Setting(
        "backend",
        partial(parse_choice, allowed=get_args(Backend)),
        "backend for tests whose marker names none: gloo, nccl or fake (simulated in one process)",
        "nccl with enough GPUs, else gloo",
        flag="--comm-backend=NAME",
        ini="string",
        argument="'gloo', 'nccl', or 'fake', which simulates ranks in one process",
    ),
    Setting(
        "simulate",
        parse_simulate,
        argument="True: tensors without memory, on the fake group; a whole number: with that many "
        "ranks or more; 'strict': as True, with no answer for values that nobody knows",
    ),
    Setting(
        "simulation_splits",
        parse_splits,
        argument="where scores that nobody knows choose experts: 'even', or each expert's "
        "share as a list, such as [4, 2, 1, 1] (default: reading such a choice is an error)",
    ),
    Setting(
        "real",
        parse_real,
        argument="axes of a simulation whose coordinates all run, a process for each: {'pp': 4} if "
        "outermost in the mesh, else with the stride, {'ep': (8, 1)}",
    ),
    Setting(
        "ranks",
        lambda given: given,  # which ranks there are depends on the other arguments
        argument="with 'fake' or simulated, which ranks run, such as [0, 511], or 'all' "
        "(default: one for each local shape if simulated, else 0)",
    ),
    Setting(
        "scope",
        partial(parse_choice, allowed=get_args(Scope)),
        argument="'test' starts ranks for each test, 'module' keeps them for the next test of the "
        "module with equal settings (default: 'test')",
    ),
    Setting(
        "timeout_s",
        parse_timeout_s,
        "deadline of a distributed test whose marker names none",
        flag="--comm-timeout=SECONDS",
        ini="string",
        argument="seconds after which ranks that still run are shown and ended",
    ),
    Setting(
        "device",
        partial(parse_choice, allowed=get_args(Device)),
        argument="'cpu' or 'cuda', where dist_info.device and device_mesh are (default: cuda with "
        "nccl, else cpu)",
    ),
    Setting(
        "rank_slots",
        partial(parse_whole_number, expected="a whole number of ranks, at least 1", least=1),
        "run at most N ranks at once across all xdist workers: a test waits until there is room "
        "for its ranks",
        "no limit",
        flag="--rank-slots=N",
        ini="string",
    ),
    Setting(
        "start",
        partial(parse_choice, allowed=get_args(Start)),
        "fork: ranks are forked, which is fast; spawn: each is a new pytest process, which takes "
        "seconds per test; auto: forked, unless threads, CUDA or a process group that was started "
        "during collection would not survive it",
        flag="--comm-start=HOW",
        ini="string",
    ),
    Setting(
        "artifacts_dir",
        Path,
        "keep what failed comparisons received and expected in DIR; `fsdp-comm accept DIR` accepts "
        "them",
        flag="--comm-artifacts=DIR",
    ),
    Setting(
        "report_dir",
        Path,
        "write an HTML report of the run to DIR/index.html: what each test sent, gathered and "
        "sharded, and how that differs from its snapshots",
        flag="--comm-report=DIR",
    ),
    Setting(
        "pdb_rank",
        partial(parse_whole_number, expected="a rank, 0 or greater", least=0),
        "the rank in which --pdb, --trace and breakpoint() debug a distributed test",
        "the lowest that runs",
        flag="--pdb-rank=N",
    ),
    Setting(
        "summary_file",
        Path,
        "write what differs from the snapshots, and what that costs, to FILE as Markdown (on "
        "GitHub, the summary of the step has it without this option)",
        flag="--comm-summary=FILE",
    ),
    Setting(
        "progress_s",
        parse_timeout_s,
        "report on the terminal where the ranks of a test are if it still runs after this many "
        "seconds, and again each time the elapsed time has doubled",
        ini="string",
    ),
    Setting(
        "snapshot_dir",
        Path,
        "directory of the communication snapshots, relative to the root directory",
        ini="string",
    ),
    Setting(
        "findings",
        _parse_findings,
        "levels and thresholds of fsdp_tree's findings, one per line: 'split-tie = off', "
        "'small_nbytes = 4096'",
        "those of docs/fsdp-tree.md",
        ini="linelist",
    ),
)
# The marker's arguments by name, in the order of its signature.
MARKER_ARGUMENTS: Final = {setting.name: setting for setting in DECLARED if setting.argument}
# The command line options that take a path.
PATH_OPTIONS: Final = tuple(setting.option for setting in DECLARED if setting.is_path)


@dataclass(frozen=True, slots=True, kw_only=True)
class RealAxis:
    """An axis of a simulated mesh with a process for each coordinate."""

    name: str
    size: int
    stride: int
    """From the rank at one coordinate to the rank at the next."""


def ranks_along(axes: Iterable[RealAxis], ranks: Iterable[int]) -> tuple[int, ...]:
    """Some ranks, and those that differ from one of them in these axes alone; ascending."""
    found = {*ranks}
    for axis in axes:
        found = {
            rank + (place - rank // axis.stride % axis.size) * axis.stride
            for rank in found
            for place in range(axis.size)
        }
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedSettings:
    """How one test runs on ranks, after marker, options, ini values and defaults are resolved."""

    world_size: int
    """Ranks of the test's process group; at least 1."""
    backend: Backend
    ranks: tuple[int, ...]
    """The ranks that really run, ascending: all of them, or the chosen ones with ``fake``."""
    scope: Scope
    """``test``: fresh ranks for each; ``module``: kept for a module's tests of equal settings."""
    timeout_s: float
    """Seconds from the start of the ranks until they are dumped and killed; greater than 0."""
    device: Device | None
    """``cpu``, ``cuda``; None lets the backend decide."""
    simulation: Simulation = ""
    """Whether tensors have no memory, and what unknown values are; empty for real tensors."""
    simulation_splits: tuple[float, ...] | None = None
    """Shares of experts where scores choose them; empty if equal, None if not declared."""
    real: tuple[RealAxis, ...] = ()
    """Of a simulation: what is sent along them arrives."""
    finds_ranks: bool = False
    """Whether ranks that keep other shapes than `ranks` are to run as well."""


# On an item's stash: present exactly if the test is distributed.
SETTINGS: Final = pytest.StashKey[DistributedSettings]()
# On an item's stash: pytest-timeout's limit, if it has one for the whole test.
PLUGIN_TIMEOUT_S: Final = pytest.StashKey[float]()
# On the config's stash, from `pytest_configure` on.
OPTIONS: Final = pytest.StashKey[SessionOptions]()
# On the config's stash, exactly if a report is written: the `run_report.Notes`, to which
# fixtures pass on what they make, and which is in a room above theirs.
OBSERVER: Final = pytest.StashKey[Any]()


def show_problems(problems: Sequence[str]) -> str:
    """Put usage errors under one headline, each on a line; one alone needs none."""
    if len(problems) == 1:
        return problems[0]
    return "\n  ".join((f"{len(problems)} usage errors of pytest-fsdp-comm:", *problems))


def add_options(parser: pytest.Parser) -> None:
    """Register the command line options and ini values."""
    group = parser.getgroup("fsdp-comm", "communication regression tests (pytest-fsdp-comm)")
    for setting in DECLARED:
        flag, ini, default = setting.option, setting.ini_name, setting.shown_default
        known = [f"ini: {ini}"] if flag and ini else []
        known += [f"default: {default}"] if default else []
        described = f"{setting.text} ({'; '.join(known)})" if known else setting.text
        if flag:
            # No default here: it would hide the ini value.
            group.addoption(flag, metavar=setting.flag.partition("=")[2], help=described)
        if setting.ini:
            unit = ", in seconds" if flag and setting.name.endswith("_s") else ""
            text = f"default for {flag}{unit}" if flag else described
            parser.addini(ini, text, type=setting.ini)


def join_paths(arguments: Iterable[str]) -> list[str]:
    """Write each of our options that takes a path and its value as one word."""
    # pytest chooses its root directory before it knows a plugin's options: it takes an existing
    # path that is a word of its own for a path of tests.
    words = iter(arguments)
    return [
        f"{word}={value}" if (value := word in PATH_OPTIONS and next(words, None)) else word
        for word in words
    ]


def read_session_options(config: pytest.Config) -> SessionOptions:
    """Parse command line and ini; a usage error says where each wrong value came from."""
    problems: list[str] = []

    def attempt(where: str, parse: Callable[[Any], Any], given: Any) -> Any:
        try:
            return parse(given)
        except (ValueError, pytest.UsageError) as problem:
            problems.append(f"{where}{problem}")
            return None

    values: dict[str, Any] = {}
    for setting in DECLARED:
        where, given = _given(config, setting)
        if given is not None:
            values[setting.name] = attempt(where, setting.parse, given)
    launched = attempt("", _read_launch, config)
    if launched and config.getoption("--world-size") is None:
        # The ini value is the project's default; what was launched is what this run wants.
        values["world_size"] = launched.world_size
    if values.get("pdb_rank") is not None and config.getoption("dist", "no") != "no":
        # As xdist words it for --pdb.
        problems.append("--pdb-rank is incompatible with distributing tests; try using -n0 or -nno")
    given = values.get("snapshot_dir", _DEFAULTS["snapshot_dir"])
    directory = attempt("ini fsdp_comm_snapshot_dir: ", partial(_snapshot_dir, config), given)
    if problems:
        raise pytest.UsageError(show_problems(problems))
    values |= {"snapshot_dir": directory, "launched": launched}
    return SessionOptions(**values)


def _given(config: pytest.Config, setting: Setting) -> tuple[str, Any]:
    """Find where a setting is given, to begin an error with, and its text; None if nowhere."""
    given = config.getoption(setting.option) if setting.flag else None
    if setting.is_path:
        # Relative to where the user typed it, as with --junitxml.
        given = config.invocation_params.dir / given if given else None
    if given is not None or not setting.ini:
        return f"{setting.option}: ", given
    # What parses lines says itself which is wrong.
    where = "ini " if setting.ini == "linelist" else f"ini {setting.ini_name}: "
    return where, config.getini(setting.ini_name) or None


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


def _snapshot_dir(config: pytest.Config, given: Path) -> Path:
    # Without "..", by which two names of one directory would differ; a link's is its target's.
    root = config.rootpath.resolve() if ".." in given.parts else config.rootpath
    directory = Path(os.path.normpath(root / given))
    foreign = getattr(config.option, "snapshot_dirname", "")
    if foreign in directory.parts:
        raise pytest.UsageError(
            f"{foreign!r} is where syrupy keeps the files of plain "
            "`snapshot` assertions and deletes files that it does not know; choose another "
            "directory, e.g. 'snapshots'"
        )
    return directory


def describe(options: SessionOptions) -> str:
    """Return the line of the report header."""
    backend = options.backend or "nccl with enough GPUs, else gloo"
    text = f"fsdp-comm: world size {options.world_size}, backend {backend}"
    if launched := options.launched:
        text += f", rank {launched.rank} of {launched.world_size} started by {launched.launcher}"
    if options.start != "auto" and not options.launched:
        text += f", ranks are {'forked' if options.start == 'fork' else 'new processes'}"
    if options.rank_slots is not None:
        text += f", at most {options.rank_slots} ranks at once"
    return text
