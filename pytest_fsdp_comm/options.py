"""Command line, ini and marker, parsed once into frozen values; every usage error lives here."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

Backend = Literal["gloo", "nccl", "fake"]
Scope = Literal["test", "module"]
Device = Literal["cpu", "cuda"]

MARKER_NAME: Final = "distributed"
MARKER_SIGNATURE: Final = (
    "distributed(world_size=None, *, backend=None, ranks=None, scope='test', timeout_s=None, "
    "device=None)"
)
WORLD_SIZE_PARAM: Final = "_fsdp_comm_world_size"
"""Name of the fixture that carries a parametrized world size."""

MAX_PROCESSES: Final = 256
"""Largest world size with a process for each rank. A rank takes about 200 MB of its own once torch
ran, and a control message passes at most 253 descriptors (``SCM_MAX_FD`` in Linux)."""
MAX_SIMULATED: Final = 131_072
"""Largest world size with ``fake``: 16 times the largest mesh that the recorder was measured on."""

DEFAULT_WORLD_SIZE: Final = 2
DEFAULT_TIMEOUT_S: Final = 120.0

_ALLOWED: Final = ("world_size", "backend", "ranks", "scope", "timeout_s", "device")


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
        """The part of a snapshot's file name that tells world sizes apart, e.g. ``ws4``."""
        return f"ws{self.world_size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What command line and ini say, before any marker is looked at."""

    world_size: int
    """World size of tests whose marker names none."""
    backend: Backend | None
    """Backend of tests whose marker names none; None chooses by the GPUs that are visible."""
    timeout_s: float
    """Deadline of tests whose marker names none, in seconds."""
    snapshot_dir: Path
    """Absolute directory of the snapshot files."""
    artifacts_dir: Path | None
    """Absolute directory for what failed comparisons received; None keeps nothing."""


SETTINGS: Final = pytest.StashKey[DistributedSettings]()
"""On an item's stash: present exactly if the test is distributed."""
OPTIONS: Final = pytest.StashKey[SessionOptions]()
"""On the config's stash, from ``pytest_configure`` on."""


class _BadValueError(ValueError):
    """What is wrong with one value; the caller adds where it came from."""


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
        help="gloo, nccl or fake (simulated in one process), for tests whose marker names no "
        "backend (ini: fsdp_comm_backend; default: nccl with enough GPUs, else gloo)",
    )
    group.addoption(
        "--comm-timeout",
        metavar="SECONDS",
        help="deadline of a distributed test whose marker names none "
        f"(ini: fsdp_comm_timeout_s; default {DEFAULT_TIMEOUT_S:.0f})",
    )
    group.addoption(
        "--comm-artifacts",
        metavar="DIR",
        help="keep what failed comparisons received under DIR, laid out like the snapshot "
        "directory: copying it over accepts the change",
    )
    parser.addini("fsdp_comm_world_size", "default of --world-size", default="")
    parser.addini("fsdp_comm_backend", "default of --comm-backend", default="")
    parser.addini("fsdp_comm_timeout_s", "default of --comm-timeout, in seconds", default="")
    parser.addini(
        "fsdp_comm_snapshot_dir",
        "directory of the communication snapshots, relative to the root directory",
        default="snapshots",
    )


def read_session_options(config: pytest.Config) -> SessionOptions:
    """Parses command line and ini.

    Raises:
        pytest.UsageError: A value is ill-typed or out of range; the text says where it came from.
    """

    def read(flag: str, ini: str, parse: Callable[[str], Any], default: Any) -> Any:
        given = config.getoption(flag)
        text, where = (given, flag) if given is not None else (config.getini(ini), f"ini {ini}")
        if given is None and not text:
            return default
        try:
            return parse(text)
        except _BadValueError as problem:
            raise pytest.UsageError(f"{where}: {problem}") from None

    artifacts = config.getoption("--comm-artifacts")
    return SessionOptions(
        world_size=read("--world-size", "fsdp_comm_world_size", _world_size, DEFAULT_WORLD_SIZE),
        backend=read("--comm-backend", "fsdp_comm_backend", _backend, None),
        timeout_s=read("--comm-timeout", "fsdp_comm_timeout_s", _timeout_s, DEFAULT_TIMEOUT_S),
        snapshot_dir=config.rootpath / str(config.getini("fsdp_comm_snapshot_dir")),
        # Relative to where the user typed it, as with --junitxml.
        artifacts_dir=config.invocation_params.dir / artifacts if artifacts else None,
    )


def marker_world_sizes(mark: pytest.Mark) -> tuple[int, ...] | None:
    """The world sizes that a marker parametrizes over.

    Returns:
        The sizes of a valid list; None if the marker names none or one, or an invalid list, which
        `resolve` will report with its test.
    """
    given = mark.args[0] if mark.args else mark.kwargs.get("world_size")
    if not isinstance(given, (list, tuple)) or not given:
        return None
    try:
        return tuple(_world_size(size) for size in given)
    except _BadValueError:
        return None


def resolve(
    mark: pytest.Mark,
    options: SessionOptions,
    *,
    parametrized: int | None,
    count_gpus: Callable[[], int],
) -> DistributedSettings:
    """Combines a marker with the session's options. A value of the marker wins.

    Args:
        mark: The test's ``distributed`` marker.
        options: What command line and ini say.
        parametrized: This item's world size if the marker lists several; None otherwise.
        count_gpus: Says how many GPUs are visible; called only where the answer matters.

    Raises:
        ValueError: An argument is unknown, ill-typed or out of range. The text does not name the
            test: the caller knows it.
    """
    given = _marker_arguments(mark)
    asked = given["world_size"]
    if isinstance(asked, (list, tuple)):
        if not asked:
            raise _BadValueError("world_size=[] lists no world size; expected e.g. [2, 4]")
        for size in asked:
            _labelled("world_size", _world_size, size)
        if len(set(asked)) < len(asked):
            raise _BadValueError(f"world_size={asked!r} lists a world size twice")
        asked = parametrized
    world_size = (
        options.world_size if asked is None else _labelled("world_size", _world_size, asked)
    )
    device = _one_of("device", given["device"], (*get_args(Device), None))
    backend = _labelled("backend", _backend, given["backend"]) if given["backend"] else None
    backend = backend or options.backend or _default_backend(device, world_size, count_gpus)
    if device == "cuda" and backend == "gloo" and count_gpus() == 0:
        raise _BadValueError(
            "device='cuda', but no GPU is visible; drop it, or guard the test with "
            "pytest.mark.skipif(not torch.cuda.is_available(), reason=...) and device=None"
        )
    _check_process_count(world_size, backend)
    timeout = given["timeout_s"]
    return DistributedSettings(
        world_size=world_size,
        backend=backend,
        ranks=_ranks(given["ranks"], world_size, backend),
        scope=_one_of("scope", given["scope"] or "test", get_args(Scope)),
        timeout_s=options.timeout_s
        if timeout is None
        else _labelled("timeout_s", _timeout_s, timeout),
        device=device,
    )


def _marker_arguments(mark: pytest.Mark) -> Mapping[str, Any]:
    if len(mark.args) > 1:
        raise _BadValueError(
            f"takes one positional argument (world_size), got {len(mark.args)}: "
            f"{', '.join(map(repr, mark.args))}; write {MARKER_SIGNATURE}"
        )
    for name in mark.kwargs:
        if name not in _ALLOWED:
            raise _BadValueError(
                f"unknown argument {name!r}; allowed are {', '.join(_ALLOWED)}{_hint(name)}"
            )
    if mark.args and "world_size" in mark.kwargs:
        raise _BadValueError("world_size is given twice, by position and by name")
    named = dict(mark.kwargs)
    if mark.args:
        named["world_size"] = mark.args[0]
    return {name: named.get(name) for name in _ALLOWED}


def _hint(name: str) -> str:
    import difflib  # noqa: PLC0415  # needed only on the way to an error

    aliases = {
        "nprocs": "world_size",
        "n": "world_size",
        "num_ranks": "world_size",
        "timeout": "timeout_s",
    }
    close = difflib.get_close_matches(name, _ALLOWED, n=1)
    meant = aliases.get(name) or (close[0] if close else None)
    return f"; did you mean {meant!r}?" if meant else ""


def _labelled(name: str, parse: Callable[[Any], Any], value: Any) -> Any:
    try:
        return parse(value)
    except _BadValueError as problem:
        raise _BadValueError(f"{name}: {problem}") from None


def _world_size(value: object) -> int:
    number = _whole_number(value)
    if number is None or number < 1 or number > MAX_SIMULATED:
        raise _BadValueError(
            f"expected a whole number of ranks from 1 to {MAX_PROCESSES} "
            f"(to {MAX_SIMULATED} with the fake backend), got {value!r}"
        )
    return number


def _whole_number(value: object) -> int | None:
    if isinstance(value, str):
        return int(value) if re.fullmatch(r"\s*-?[0-9]+\s*", value) else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _check_process_count(world_size: int, backend: Backend) -> None:
    if backend != "fake" and world_size > MAX_PROCESSES:
        raise _BadValueError(
            f"world_size: {world_size} ranks are too many processes for one machine (at most "
            f"{MAX_PROCESSES} with {backend}); simulate them in one process with backend='fake' "
            "or --comm-backend fake"
        )


def _backend(value: object) -> Backend:
    for name in get_args(Backend):
        if value == name:
            return name  # type: ignore[no-any-return]  # get_args is untyped
    raise _BadValueError(
        f"unknown backend {value!r}; expected one of {', '.join(get_args(Backend))}"
    )


def _default_backend(
    device: Device | None, world_size: int, count_gpus: Callable[[], int]
) -> Backend:
    return "nccl" if device != "cpu" and count_gpus() >= world_size else "gloo"


def _timeout_s(value: object) -> float:
    try:
        seconds = float(value)  # type: ignore[arg-type]  # what float() rejects is reported below
    except (TypeError, ValueError):
        seconds = math.nan
    if isinstance(value, bool) or not seconds > 0 or math.isinf(seconds):
        raise _BadValueError(f"expected a positive number of seconds, got {value!r}")
    return seconds


def _one_of(name: str, value: Any, allowed: Sequence[Any]) -> Any:
    if value not in allowed:
        raise _BadValueError(
            f"{name}: expected one of {', '.join(map(repr, allowed))}, got {value!r}"
        )
    return value


def _ranks(given: object, world_size: int, backend: Backend) -> tuple[int, ...]:
    if given is None:
        return (0,) if backend == "fake" else tuple(range(world_size))
    if backend != "fake":
        raise _BadValueError(
            f"ranks: chooses among simulated ranks and goes with backend='fake' only; "
            f"the backend is {backend!r}, whose ranks all run"
        )
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise _BadValueError(f"ranks: expected a list of ranks such as (0, 3), got {given!r}")
    for rank in given:
        number = _whole_number(rank)
        if isinstance(rank, str) or number is None or not 0 <= number < world_size:
            raise _BadValueError(
                f"ranks: expected whole numbers from 0 to {world_size - 1}, got {rank!r}"
            )
    chosen = tuple(sorted(set(given)))
    if len(chosen) > MAX_PROCESSES:
        raise _BadValueError(
            f"ranks: at most {MAX_PROCESSES} simulated ranks run, got {len(chosen)}"
        )
    return chosen


def resolve_items(
    items: Sequence[pytest.Item], options: SessionOptions, *, count_gpus: Callable[[], int]
) -> None:
    """Puts `SETTINGS` on the stash of every distributed item.

    Raises:
        pytest.UsageError: At least one marker is wrong; the text lists each with its test.
    """
    problems: dict[str, None] = {}
    for item in items:
        mark = item.get_closest_marker(MARKER_NAME)
        if mark is None:
            continue
        callspec = getattr(item, "callspec", None)
        parametrized = callspec.params.get(WORLD_SIZE_PARAM) if callspec else None
        try:
            item.stash[SETTINGS] = resolve(
                mark, options, parametrized=parametrized, count_gpus=count_gpus
            )
        except _BadValueError as problem:
            problems[f"{item.nodeid}: @pytest.mark.{MARKER_NAME}: {problem}"] = None
    if problems:
        raise pytest.UsageError("\n".join(problems))


def describe(options: SessionOptions) -> str:
    """The line of the report header."""
    backend = options.backend or "nccl with enough GPUs, else gloo"
    return f"fsdp-comm: world size {options.world_size}, backend {backend}"
