"""Where a rank is: its line of user code, its module, and its place in the order of collectives.

Read on a thread of the rank itself, while its main thread may be stuck in a collective, which lets
go of the GIL. The order comes from torch's flight recorder, which watches gloo and NCCL from torch
2.13 on with no setting, but no point-to-point calls, and nothing of the fake group.
"""

from __future__ import annotations

import sys
import threading
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm.ranks.hangs.stacks import is_library, is_runner, shown_path

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# What ranks compare: where one waits, and what the others issued in its place.
_KEPT_ENTRIES = 16


def read_position(since_ns: int) -> dict[str, Any]:
    """Describes the main thread, as values that JSON can carry.

    Args:
        since_ns: Collectives before this time (`time.time_ns`) belong to another test.

    Returns:
        ``site`` (``path:line in function`` of the innermost user code), ``module`` (FQN of the
        module or FSDP unit that runs; empty for the root or none), and ``groups``: for each process
        group its ``name``, ``description``, ``ranks`` and last ``entries``, each with ``seq``,
        ``kind``, ``nbytes`` and ``is_done``.
    """
    main = threading.main_thread().ident
    frames = list(_outwards(sys._current_frames().get(main or 0)))  # noqa: SLF001  # documented for debuggers
    return {
        "site": _site(frames),
        "module": _module(frames),
        "groups": _groups(since_ns, _called(frames)),
    }


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _site(frames: list[FrameType]) -> str:
    for frame in frames:
        path = frame.f_code.co_filename
        if not (is_library(path) or is_runner(path) or path.startswith("<")):
            return f"{shown_path(path)}:{frame.f_lineno} in {frame.f_code.co_name}"
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
        # Set from torch 2.6 to 2.15 once the unit has run; only told to people, so that it may go.
        unit = getattr(self, "_module_fqn", None) if _is_unit(self) else None
        if isinstance(unit, str) and unit and not called:
            return unit
        if isinstance(self, nn.Module) and frame.f_code is nn.Module._call_impl.__code__:  # noqa: SLF001  # as recording.owners.stack, whose contract test covers it
            called.append(self)
    if not called:
        return ""
    innermost, outermost = called[0], called[-1]
    return next((name for name, child in outermost.named_modules() if child is innermost), "")


def _is_unit(thing: object) -> bool:
    return type(thing).__name__ == "FSDPParamGroup"


def _groups(since_ns: int, called: str) -> list[dict[str, Any]]:
    from pytest_fsdp_comm.recording.flight_recorder import flown  # noqa: PLC0415  # loads torch

    entries: dict[str, list[dict[str, Any]]] = {}
    descriptions: dict[str, str] = {}
    for entry in flown(since_ns) if "torch.distributed" in sys.modules else []:
        descriptions[entry.group] = entry.description
        kind = entry.kind
        if not entry.is_done and kind == "all_reduce" and called.startswith("reduce_scatter"):
            kind = "reduce_scatter"  # which gloo runs as an all-reduce
        entries.setdefault(entry.group, []).append(
            {"seq": entry.seq, "kind": kind, "nbytes": entry.nbytes, "is_done": entry.is_done}
        )
    members = _members()
    # Also the groups in which this rank has issued nothing: it may be the one that is waited for.
    return [
        {
            "name": name,
            "description": descriptions.get(name, known[0] if known else ""),
            "ranks": known[1] if known else [],
            "entries": entries.get(name, [])[-_KEPT_ENTRIES:],
        }
        for name in dict.fromkeys([*entries, *members])
        for known in [members.get(name)]
    ]


def _members() -> dict[str, tuple[str, list[int]]]:
    """Description and global ranks of each process group; empty where torch does not tell them."""
    c10d: Any = sys.modules.get("torch.distributed.distributed_c10d")
    # Private, but the only list of all groups (read in torch 2.6 to 2.15); only told to people.
    groups = getattr(getattr(c10d, "_world", None), "pg_group_ranks", {})
    return {
        group.group_name: (group.group_desc, sorted(ranks))
        for group, ranks in list(groups.items())
        if hasattr(group, "group_name")
    }
