"""Resolve a test's ``distributed`` marker against the session's options."""

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
    """Return the world sizes to parametrize over; None if the marker sets no list."""
    try:
        sizes = _parse_arguments(mark)["world_size"]
    except BadValueError:
        return None  # `resolve` reports the error
    return sizes if isinstance(sizes, tuple) else None


def resolve(
    mark: pytest.Mark,
    options: SessionOptions,
    *,
    parametrized: int | None,
    count_gpus: Callable[[], int],
) -> DistributedSettings:
    """Combine the marker with the session's options; raise BadValueError for invalid arguments."""
    # `parametrized` is the item's world size if the marker lists several. `count_gpus` is slow, so
    # call it only if the backend depends on it.
    arguments = _parse_arguments(mark)
    world_size = parametrized or arguments["world_size"] or options.world_size
    device = arguments["device"]
    simulation = _choose_simulation(arguments["simulate"], world_size)
    _check_simulation_arguments(arguments, simulation)
    real = _make_real_axes(arguments["real"] or {}, world_size) if simulation else ()
    backend = "fake" if simulation else arguments["backend"] or options.backend
    if backend is None:
        backend = "nccl" if device != "cpu" and count_gpus() >= world_size else "gloo"
    ranks = ranks_along(real, _choose_ranks(arguments["ranks"], world_size, backend))
    if options.launched is None or options.launched.world_size != world_size or backend == "fake":
        _check_number_of_ranks(ranks, backend, options.rank_slots)
    if options.pdb_rank is not None and options.pdb_rank not in ranks:
        raise BadValueError(
            f"--pdb-rank {options.pdb_rank} is not a rank of this test, which runs on "
            f"{name_ranks(ranks)}: choose one of these, or select other tests"
        )
    return DistributedSettings(
        world_size=world_size,
        backend=backend,
        ranks=ranks,
        scope=arguments["scope"] or "test",
        timeout_s=arguments["timeout_s"] or options.timeout_s,
        device=device,
        simulation=simulation,
        simulation_splits=arguments["simulation_splits"],
        real=real,
        adds_distinct_ranks=bool(simulation) and arguments["ranks"] is None,
    )


def _check_simulation_arguments(arguments: Mapping[str, Any], simulation: Simulation) -> None:
    if arguments["device"] == "cuda" and arguments["backend"] == "fake" and not simulation:
        raise BadValueError(
            "device='cuda' is set, but ranks of backend='fake' run on the CPU; simulate a GPU with "
            "simulate=, drop device=, or run the test on GPUs with backend='nccl'"
        )
    if simulation and arguments["backend"] not in {None, "fake"}:
        raise BadValueError(
            f"backend={arguments['backend']!r} conflicts with simulate={arguments['simulate']!r}, "
            "because a simulation sends nothing; drop one of them"
        )
    for name in ("simulation_splits", "real"):
        if arguments[name] is not None and not arguments["simulate"]:
            raise BadValueError(f"{name}: applies only to simulations; set simulate= or drop it")


def add_ranks(
    settings: DistributedSettings, further: Iterable[int], options: SessionOptions
) -> DistributedSettings:
    """Return settings with the `further` ranks added; raise BadValueError if there are too many."""
    ranks = ranks_along(settings.real, {*settings.ranks, *further})
    _check_number_of_ranks(ranks, settings.backend, options.rank_slots)
    return replace(settings, ranks=ranks, adds_distinct_ranks=False)


def _choose_simulation(simulate: bool | int | str | None, world_size: int) -> Simulation:
    if simulate == "strict":
        return "strict"
    # True counts as 1, so it simulates every world size.
    return "answering" if isinstance(simulate, int) and 1 <= simulate <= world_size else ""


def _make_real_axes(real: Mapping[str, Sequence[int]], world_size: int) -> tuple[RealAxis, ...]:
    axes = []
    outer = 1
    for name, (size, *strides) in real.items():
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
            f"real: the axes {', '.join(real)} overlap: write the size and the mesh stride of "
            "each, such as {'ep': (8, 1)}"
        )
    return tuple(axes)


def uses_plugin(item: pytest.Item) -> bool:
    """Return whether a test runs on ranks or requests ``comm_snapshot``."""
    return SETTINGS in item.stash or "comm_snapshot" in getattr(item, "fixturenames", ())


def may_record(item: pytest.Item) -> bool:
    """Return whether a test runs on ranks or requests ``comm_mode`` or ``fsdp_tree``."""
    fixtures = {"comm_mode", "fsdp_tree"}.intersection(getattr(item, "fixturenames", ()))
    return SETTINGS in item.stash or bool(fixtures)


def snapshot_variant(item: pytest.Item) -> str:
    """Return the world size as it appears in snapshot names: ``ws4``, or ``ws1`` without ranks."""
    settings = item.stash.get(SETTINGS, None)
    return f"ws{settings.world_size if settings else 1}"


def snapshot_test_name(item: pytest.Item) -> str:
    """Return ``TestClass.test_name[params]``, the first part of snapshot names."""
    # Leave out a parametrized world size, which the variant already contains, so that the snapshot
    # of world_size=4 remains valid after a change to world_size=[2, 4].
    name = item.name
    callspec = getattr(item, "callspec", None)
    size = callspec.params.get(WORLD_SIZE_PARAM) if callspec else None
    if size is not None:
        # The world size is the last parameter, because `plugin.pytest_generate_tests` is `trylast`.
        name = re.sub(rf"(?:\[|-)ws{size}\]$", lambda end: "]" if end[0][0] == "-" else "", name)
    classes = (node.name for node in item.listchain() if isinstance(node, pytest.Class))
    return ".".join((*classes, name))


def _parse_arguments(mark: pytest.Mark) -> dict[str, Any]:
    """Parse the marker's arguments; an argument that the marker does not set is None."""
    if len(mark.args) > 1:
        raise BadValueError(
            f"takes one positional argument (world_size), got {len(mark.args)}: "
            f"{', '.join(map(repr, mark.args))}; write {MARKER_SIGNATURE}"
        )
    for name in mark.kwargs:
        if name not in MARKER_ARGUMENTS:
            allowed = ", ".join(MARKER_ARGUMENTS)
            raise BadValueError(f"unknown argument {name!r}; expected one of {allowed}")
    if mark.args and "world_size" in mark.kwargs:
        raise BadValueError("world_size is set twice, by position and by name")
    named = {**dict.fromkeys(MARKER_ARGUMENTS), **mark.kwargs}
    if mark.args:
        named["world_size"] = mark.args[0]
    return {
        name: None if value is None else _parse_argument(name, value)
        for name, value in named.items()
    }


def _parse_argument(name: str, value: Any) -> Any:
    try:
        if name == "world_size" and isinstance(value, (list, tuple)):
            return _parse_world_sizes(value)
        return _parse_value(MARKER_ARGUMENTS[name].parse, value)
    except BadValueError as problem:
        raise BadValueError(f"{name}: {problem}") from None


def _parse_value(parse: Callable[[Any], Any], value: object) -> Any:
    """Parse a value, but refuse a number as text, which only options and ini values may have."""
    parsed = parse(value)
    if isinstance(value, str) and isinstance(parsed, (int, float)):
        raise BadValueError(f"expected a number, got the text {value!r}")
    return parsed


def _parse_world_sizes(values: Sequence[object]) -> tuple[int, ...]:
    if not values:
        raise BadValueError("expected at least one world size, such as [2, 4], got []")
    sizes = tuple(_parse_value(parse_world_size, value) for value in values)
    if len({*sizes}) < len(sizes):
        raise BadValueError(f"{values!r} lists a world size twice")
    return sizes


def resolve_items(
    session: pytest.Session, items: list[pytest.Item], *, count_gpus: Callable[[], int]
) -> None:
    """Store each distributed item's settings in its stash; an invalid marker ends the session."""
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
    """End the session with an error before any test runs."""
    if hasattr(session.config, "workerinput"):
        # A UsageError in an xdist worker causes an internal error or a failed assertion in the
        # controller (xdist 3.8). A worker that has no items and sets `shouldfail` ends cleanly.
        items.clear()
        session.shouldfail = text
    else:
        raise pytest.UsageError(text)


def _check_number_of_ranks(ranks: Sequence[int], backend: Backend, slots: int | None) -> None:
    count = len(ranks)
    if count > MAX_PROCESSES:
        remedy = "simulate them in one process with backend='fake' or --comm-backend fake"
        if backend == "fake":
            remedy = "name some of them, ranks=[0, 3]"
        raise BadValueError(
            f"{count} ranks are too many processes for one machine (at most {MAX_PROCESSES}); "
            f"{remedy}"
        )
    if slots is not None and count > slots:
        raise BadValueError(
            f"the test needs {count} ranks, but --rank-slots (ini fsdp_comm_rank_slots) allows "
            f"only {slots} at a time; raise it to at least {count}, lower the world size, or "
            "simulate the ranks in one process with backend='fake'"
        )


def _choose_ranks(selection: object, world_size: int, backend: Backend) -> tuple[int, ...]:
    if selection == "all" or (selection is None and backend != "fake"):
        return tuple(range(world_size))
    if selection is None:
        return (0,)
    if backend != "fake":
        raise BadValueError(
            f"ranks: selects simulated ranks, so it requires backend='fake'; with {backend!r}, all "
            "ranks run"
        )
    if not isinstance(selection, Sequence) or isinstance(selection, str) or not selection:
        raise BadValueError(f"ranks: expected 'all' or a list such as [0, 3], got {selection!r}")
    for rank in selection:
        if type(rank) is not int or not 0 <= rank < world_size:
            raise BadValueError(
                f"ranks: expected whole numbers from 0 to {world_size - 1}, got {rank!r}"
            )
    return tuple(sorted(set(selection)))
