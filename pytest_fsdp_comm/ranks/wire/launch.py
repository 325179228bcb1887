"""What every process of one set of ranks is told, and what a set of rank processes can do."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pytest_fsdp_comm.options import DistributedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where launched processes meet: names below a prefix on a TCP store of torch."""

    host: str
    """The host that serves the store."""
    port: int
    """The store's port."""
    prefix: str
    """What every name begins with."""

    def below(self, name: str) -> StoreAddress:
        """A part of the store, for names of its own."""
        return dataclasses.replace(self, prefix=f"{self.prefix}/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedPart:
    """The one rank that a process starts for a test whose ranks are on many processes."""

    rank: int
    """The rank, from 0."""
    local_rank: int
    """The rank on its machine, from 0."""
    local_world_size: int
    """The ranks on this machine."""
    store: StoreAddress
    """Of this set of ranks alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One set of ranks, which runs one test or, with ``scope="module"``, several."""

    item_index: int
    """The first test, as its place in the session's items."""
    nodeid: str
    """The first test, for ranks that collect anew."""
    settings: DistributedSettings
    """How the test runs on ranks."""
    directory: Path
    """Of this set of ranks alone; holds the socket, the logs and the stores."""
    basetemp: Path
    """Where the session's temporary directories are."""
    echoes: tuple[str, ...]
    """The streams that are shown at once: with ``-s`` what a rank prints, with ``--setup-show`` and
    the like what its pytest writes."""
    part: LaunchedPart | None = None
    """The only rank that is started here; None starts all of them."""
    slots: tuple[Path, ...] = ()
    """Files of the slots that whoever starts the ranks holds while they live."""
    terminal: tuple[int, ...] = ()
    """Descriptors of the session's standard input, output and error; empty if it has none."""
    debugged_rank: int = 0
    """The rank that debuggers run in."""
    gpus: tuple[str, ...] = ()
    """The GPUs that the ranks may use, by the names of the caller's visible list; empty leaves the
    list as it is."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that this process starts."""
        return (self.part.rank,) if self.part else self.settings.ranks

    @property
    def socket_path(self) -> Path:
        """Where the supervisor listens."""
        return self.directory / "socket"

    def log_path(self, rank: int, stream: str) -> Path:
        """Where a rank's ``stdout`` or ``stderr`` goes, or the ``terminal`` of its pytest."""
        return self.directory / f"rank{rank}.{stream}"

    def stacks_path(self, rank: int) -> Path:
        """Where a rank writes its stacks when asked."""
        return self.directory / f"rank{rank}.stacks"

    @property
    def departures_path(self) -> Path:
        """Where the ranks say which tests they have left."""
        return self.directory / "departures"

    def dump(self) -> str:
        """As one line of JSON."""
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def load(cls, text: str) -> Launch:
        """Reads what `dump` wrote."""
        values: dict[str, Any] = json.loads(text)
        settings = values.pop("settings")
        settings["ranks"] = tuple(settings["ranks"])
        values["echoes"] = tuple(values["echoes"])
        part = values.pop("part")
        if part is not None:
            part = LaunchedPart(**{**part, "store": StoreAddress(**part["store"])})
        values["slots"] = tuple(Path(slot) for slot in values["slots"])
        values["terminal"] = tuple(values["terminal"])
        values["gpus"] = tuple(values["gpus"])
        return cls(
            part=part,
            settings=DistributedSettings(**settings),
            directory=Path(values.pop("directory")),
            basetemp=Path(values.pop("basetemp")),
            **values,
        )


class RankProcesses(Protocol):
    """The processes of one set of ranks."""

    def fileno(self) -> int | None:
        """A descriptor that becomes readable when a process ended; None if there is none."""

    def exit_statuses(self) -> dict[int, int]:
        """The ranks whose process has ended.

        Returns:
            Exit status, or minus the signal's number, as `os.waitstatus_to_exitcode` tells it.
        """

    def send_signal(self, rank: int, number: int) -> None:
        """Sends a signal to a rank, if it still lives."""

    def rest(self) -> None:
        """Says that the ranks run nothing, but are kept for another test."""

    def resume(self) -> bool:
        """Says that kept ranks are to run another test.

        Returns:
            Whether they still live.
        """

    def end(self, within_s: float) -> dict[int, int]:
        """Kills every process that the ranks left, frees their slots, and returns after that.

        Args:
            within_s: How long to wait until they are gone.

        Returns:
            Process ids of the ranks that were killed and are still there.
        """
