"""Resolves a test's ``distributed`` marker against the session's options, or reports errors."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pytest_fsdp_comm.options import (
    MARKER_ARGUMENTS,
    MARKER_NAME,
    MARKER_SIGNATURE,
    MAX_PROCESSES,
    OPTIONS,
    SETTINGS,
    WORLD_SIZE_PARAM,
    Backend,
    BadValueError,
    DistributedSettings,
    RealAxis,
    SessionOptions,
    Simulation,
    parse_world_size,
    ranks_along,
    show_problems,
)
from pytest_fsdp_comm.text.rank_lists import name_ranks


def world_sizes(mark: pytest.Mark) -> tuple[int, ...] | None:
    """The world sizes to parametrize over; None if the marker has one, or `resolve` refuses it."""
    try:
        given = _parse_arguments(mark)
    except BadValueError:
        return None
    return given["world_size"] if isinstance(given["world_size"], tuple) else None


def resolve(
    mark: pytest.Mark,
    options: SessionOptions,
    *,
    parametrized: int | None,
    count_gpus: Callable[[], int],
) -> DistributedSettings:
    """Combine a marker with the session's options; BadValueError if an argument is wrong."""
    # A value of the marker wins. `parametrized` is the item's world size if the marker lists
    # several; `count_gpus` is called only where the answer matters. Errors do not name the test,
    # which the caller knows.
    given = _parse_arguments(mark)
    size = given["world_size"]
    world_size = parametrized or size or options.world_size
    device = given["device"]
    simulation = _simulation(given["simulate"], world_size)
    _check_simulation(given, simulation)
    real = _real_axes(given["real"] or {}, world_size) if simulation else ()
    backend = "fake" if simulation else given["backend"] or options.backend
    if backend is None:
        backend = "nccl" if device != "cpu" and count_gpus() >= world_size else "gloo"
    ranks = ranks_along(real, _ranks(given["ranks"], world_size, backend))
    if options.launched is None or options.launched.world_size != world_size or backend == "fake":
        _check_room(ranks, backend, options.rank_slots)
    if options.pdb_rank is not None and options.pdb_rank not in ranks:
        raise BadValueError(
            f"--pdb-rank {options.pdb_rank} is not a rank of this test, which runs on "
            f"{name_ranks(ranks)}: choose one of these, or select other tests"
        )
    return DistributedSettings(
        world_size=world_size,
        backend=backend,
        ranks=ranks,
        scope=given["scope"] or "test",
        timeout_s=given["timeout_s"] or options.timeout_s,
        device=device,
        simulation=simulation,
        simulation_splits=given["simulation_splits"],
        real=real,
        finds_ranks=bool(simulation) and given["ranks"] is None,
    )


def _check_simulation(given: Mapping[str, Any], simulation: Simulation) -> None:
    if given["device"] == "cuda" and (simulation or given["backend"] == "fake"):
        raise BadValueError(
            "device='cuda' with simulated ranks, which run on the CPU; drop device='cuda', or run "
            "the test on GPUs with backend='nccl'"
        )
    if simulation and given["backend"] not in {None, "fake"}:
        raise BadValueError(
            f"backend={given['backend']!r} with simulate={given['simulate']!r}, where nothing is "
            "sent; drop one of the two"
        )
    for name in ("simulation_splits", "real"):
        if given[name] is not None and not given["simulate"]:
            raise BadValueError(
                f"{name}: applies to simulations, so it requires simulate=; drop it"
            )


def with_further_ranks(
    settings: DistributedSettings, further: Iterable[int], options: SessionOptions
) -> DistributedSettings:
    """Add the distinct ranks that a simulation has found; BadValueError if they are too many."""
    ranks = ranks_along(settings.real, {*settings.ranks, *further})
    _check_room(ranks, settings.backend, options.rank_slots)
    return replace(settings, ranks=ranks, finds_ranks=False)


def _simulation(given: bool | int | str | None, world_size: int) -> Simulation:
    if given == "strict":
        return "strict"
    # True is 1.
    return "answering" if isinstance(given, int) and 1 <= given <= world_size else ""


def _real_axes(given: Mapping[str, Sequence[int]], world_size: int) -> tuple[RealAxis, ...]:
    axes = []
    outer = 1
    for name, (size, *strides) in given.items():
        outer *= 1 if strides else size
        stride = strides[0] if strides else world_size // outer
        if stride == 0 or world_size % (size * stride):
            raise BadValueError(
                f"real: an axis {name!r} of size {size} and stride {stride} does not divide "
                f"{world_size} ranks"
            )
        axes.append(RealAxis(name=name, size=size, stride=stride))
    if len(ranks_along(axes, [0])) < math.prod(axis.size for axis in axes):
        raise BadValueError(
            f"real: the axes {', '.join(given)} overlap: give each its size and its stride in the "
            "mesh, such as {'ep': (8, 1)}"
        )
    return tuple(axes)


def uses_plugin(item: pytest.Item) -> bool:
    """Whether a test runs on ranks or compares communication."""
    return SETTINGS in item.stash or "comm_snapshot" in getattr(item, "fixturenames", ())


def may_record(item: pytest.Item) -> bool:
    """Whether a test runs on ranks or requests a fixture that records."""
    fixtures = {"comm_mode", "fsdp_tree"}.intersection(getattr(item, "fixturenames", ()))
    return SETTINGS in item.stash or bool(fixtures)


def snapshot_variant(item: pytest.Item) -> str:
    """``ws4``, the part of a file name that names the world size; ``ws1`` without ranks."""
    settings = item.stash.get(SETTINGS, None)
    return f"ws{settings.world_size if settings else 1}"


def snapshot_test_name(item: pytest.Item) -> str:
    """Return ``TestClass.test_name[params]``, by which a test's snapshots are named."""
    # Without a parametrized world size, which the variant names: a marker's 4 that becomes [2, 4]
    # keeps the reviewed file.
    name = item.name
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get(WORLD_SIZE_PARAM) if callspec else None
    if size is not None:
        # Last, as `plugin.pytest_generate_tests` comes last.
        name = re.sub(rf"(?:\[|-)ws{size}\]$", lambda end: "]" if end[0][0] == "-" else "", name)
    classes = (node.name for node in item.listchain() if isinstance(node, pytest.Class))
    return ".".join((*classes, name))


def _parse_arguments(mark: pytest.Mark) -> dict[str, Any]:
    """The marker's arguments by name, parsed; None where it gives none."""
    if len(mark.args) > 1:
        raise BadValueError(
            f"takes one positional argument (world_size), got {len(mark.args)}: "
            f"{', '.join(map(repr, mark.args))}; write {MARKER_SIGNATURE}"
        )
    for name in mark.kwargs:
        if name not in MARKER_ARGUMENTS:
            allowed = ", ".join(MARKER_ARGUMENTS)
            raise BadValueError(f"unknown argument {name!r}; allowed are {allowed}")
    if mark.args and "world_size" in mark.kwargs:
        raise BadValueError("world_size is given twice, by position and by name")
    named = {**dict.fromkeys(MARKER_ARGUMENTS), **mark.kwargs}
    if mark.args:
        named["world_size"] = mark.args[0]
    return {name: None if given is None else _parse(name, given) for name, given in named.items()}


def _parse(name: str, given: Any) -> Any:
    try:
        if name == "world_size" and isinstance(given, (list, tuple)):
            return _parse_world_sizes(given)
        return MARKER_ARGUMENTS[name].parse(given)
    except BadValueError as problem:
        raise BadValueError(f"{name}: {problem}") from None


def _parse_world_sizes(given: Sequence[object]) -> tuple[int, ...]:
    if not given:
        raise BadValueError("expected at least one world size, such as [2, 4], got []")
    sizes = tuple(map(parse_world_size, given))
    if len({*sizes}) < len(sizes):
        raise BadValueError(f"{given!r} lists a world size twice")
    return sizes


def resolve_items(
    session: pytest.Session, items: list[pytest.Item], *, count_gpus: Callable[[], int]
) -> None:
    """Put `SETTINGS` on the stash of every distributed item, or `refuse` all wrong markers."""
    problems: dict[str, None] = {}
    for item in items:
        mark = item.get_closest_marker(MARKER_NAME)
        if mark is None:
            continue
        callspec = getattr(item, "callspec", None)
        parametrized = callspec.params.get(WORLD_SIZE_PARAM) if callspec else None
        options = item.config.stash[OPTIONS]
        try:
            item.stash[SETTINGS] = resolve(
                mark, options, parametrized=parametrized, count_gpus=count_gpus
            )
        except BadValueError as problem:
            problems[f"{item.nodeid}: @pytest.mark.{MARKER_NAME}: {problem}"] = None
    if problems:
        refuse(session, items, show_problems([*problems]))


def refuse(session: pytest.Session, items: list[pytest.Item], text: str) -> None:
    """End a session before any test: by a usage error, or in an xdist worker in order."""
    if hasattr(session.config, "workerinput"):
        # A UsageError in a worker reaches the controller as an internal error or a failed assertion
        # of its scheduler (xdist 3.8): no items and a reason end it in order, before any test.
        items.clear()
        session.shouldfail = text
    else:
        raise pytest.UsageError(text)


def _check_room(ranks: Sequence[int], backend: Backend, slots: int | None) -> None:
    count = len(ranks)
    if count > MAX_PROCESSES:
        some = "name some of them, ranks=[0, 3]"
        fake = "simulate them in one process with backend='fake' or --comm-backend fake"
        raise BadValueError(
            f"{count} ranks are too many processes for one machine (at most {MAX_PROCESSES}); "
            f"{some if backend == 'fake' else fake}"
        )
    if slots is not None and count > slots:
        raise BadValueError(
            f"{count} ranks do not fit into the {slots} that --rank-slots (ini "
            f"fsdp_comm_rank_slots) allows at once; allow at least {count}, lower the world "
            "size, or simulate it in one process with backend='fake'"
        )


def _ranks(given: object, world_size: int, backend: Backend) -> tuple[int, ...]:
    if given == "all" or (given is None and backend != "fake"):
        return tuple(range(world_size))
    if given is None:
        return (0,)
    if backend != "fake":
        raise BadValueError(
            f"ranks: selects simulated ranks, so it requires backend='fake'; with {backend!r}, all "
            "ranks run"
        )
    if not isinstance(given, Sequence) or isinstance(given, str) or not given:
        raise BadValueError(f"ranks: expected 'all' or a list such as [0, 3], got {given!r}")
    for rank in given:
        if type(rank) is not int or not 0 <= rank < world_size:
            raise BadValueError(
                f"ranks: expected whole numbers from 0 to {world_size - 1}, got {rank!r}"
            )
    return tuple(sorted(set(given)))
