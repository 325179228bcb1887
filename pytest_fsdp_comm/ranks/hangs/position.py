"""Reads where this rank is: its line of user code, its module, and how far its groups have come.

Read on a thread of the rank itself, while its main thread may be stuck in a collective, which
releases the GIL. The order comes from torch's flight recorder, which watches gloo and NCCL from
torch 2.13 on with no setting, but no point-to-point calls, and nothing of the fake group.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.hangs.stacks import is_library, is_runner
from pytest_fsdp_comm.ranks.wire.positions import GroupPosition, IssuedCollective, Position
from pytest_fsdp_comm.text.paths import show_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from pytest_fsdp_comm.recording.mesh_axes import GroupAxis

# Enough to compare ranks: the collective that one waits in, and what the others issued instead.
_KEPT_COLLECTIVES = 16


def read_position(since_ns: int) -> Position:
    """Reads where the main thread is.

    Args:
        since_ns: Collectives before this time (`time.time_ns`) belong to another test.
    """
    main = threading.main_thread().ident
    # Documented for debuggers.
    frame = sys._current_frames().get(main) if main is not None else None
    frames = list(_outwards(frame))
    return Position(
        site=_site(frames), module=_module(frames), groups=_groups(since_ns, _called(frames))
    )


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site(frames: list[FrameType]) -> str:
    for frame in frames:
        path = frame.f_code.co_filename
        if not (is_library(path) or is_runner(path) or path.startswith("<")):
            return f"{show_path(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def _called(frames: list[FrameType]) -> str:
    """The function of torch.distributed that was called; empty if none was."""
    return next(
        (
            frame.f_code.co_name
            for frame in frames
            if frame.f_code.co_filename.endswith("distributed_c10d.py")
        ),
        "",
    )


def _module(frames: list[FrameType]) -> str:
    """The module that runs in forward; in backward, where none does, the FSDP unit that acts."""
    if "torch" not in sys.modules:
        return ""
    from torch import nn  # noqa: PLC0415  # not before the test does

    called: list[nn.Module] = []
    for frame in frames:
        self: Any = frame.f_locals.get("self")
        # Set from torch 2.6 to 2.15 once the unit has run; only shown to people, so it may go away.
        unit = getattr(self, "_module_fqn", None) if _is_unit(self) else None
        if isinstance(unit, str) and unit and not called:
            return unit
        # As recording.owners.stack, whose contract test covers it.
        if isinstance(self, nn.Module) and frame.f_code is nn.Module._call_impl.__code__:
            called.append(self)
    if not called:
        return ""
    innermost, outermost = called[0], called[-1]
    return next((name for name, child in outermost.named_modules() if child is innermost), "")


def _is_unit(thing: object) -> bool:
    return type(thing).__name__ == "FSDPParamGroup"


def _groups(since_ns: int, called: str) -> tuple[GroupPosition, ...]:
    from pytest_fsdp_comm.recording.flight_recorder import flown  # noqa: PLC0415  # loads torch

    issued: dict[str, list[IssuedCollective]] = {}
    for entry in flown(since_ns) if "torch.distributed" in sys.modules else []:
        kind = entry.kind
        if not entry.is_done and kind == "all_reduce" and called.startswith("reduce_scatter"):
            kind = "reduce_scatter"  # which gloo runs as an all-reduce
        issued.setdefault(entry.group, []).append(
            IssuedCollective(seq=entry.seq, kind=kind, nbytes=entry.nbytes, is_done=entry.is_done)
        )
    ranks = _ranks_of_groups()
    axes = _axes()
    # Also the groups in which this rank has issued nothing: it may be the one that is waited for.
    return tuple(
        GroupPosition(
            name=name,
            axis=axes[name].name if name in axes else "",
            is_shape=name in axes and axes[name].is_shape,
            ranks=ranks.get(name, ()),
            collectives=tuple(issued.get(name, [])[-_KEPT_COLLECTIVES:]),
        )
        for name in dict.fromkeys((*issued, *ranks))
    )


def _axes() -> dict[str, GroupAxis]:
    """How recordings name the groups; empty where that cannot be found out."""
    if "torch.distributed" not in sys.modules:
        return {}
    from pytest_fsdp_comm.recording.mesh_axes import axes_of_groups  # noqa: PLC0415  # loads torch

    # The main thread may change what is read here, and names only make the report nicer.
    with contextlib.suppress(Exception):
        return axes_of_groups()
    return {}


def _ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """The members of every process group of this rank; empty where torch lists none."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    # Private, but the only list of all groups (read in torch 2.6 to 2.15); only shown to people.
    groups = getattr(getattr(c10d, "_world", None), "pg_group_ranks", {})
    return {
        group.group_name: tuple(sorted(ranks))
        for group, ranks in list(groups.items())
        if hasattr(group, "group_name")
    }
