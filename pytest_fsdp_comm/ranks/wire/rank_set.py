"""A rank set as values: how its processes are started, for one test or several in turn."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pytest_fsdp_comm.options import DistributedSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTest:
    """What follows a test on the same ranks."""

    index: int | None = None
    """The next test, by its index in the session's items, if it is sure to be run by these ranks
    or by none: the fixtures that it shares with the test before stay. None ends them all."""
    is_none: bool = True
    """Whether no other test follows, so that the ranks do what a process does at its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSetSpec:
    """How to start a rank set; each of its processes gets it."""

    item_index: int
    """The first test, by its index in the session's items."""
    nodeid: str
    """The first test, for ranks that collect again."""
    settings: DistributedSettings
    directory: Path
    """Of this rank set alone; holds the logs and the stores."""
    basetemp: Path
    echoes: tuple[str, ...]
    """Streams to show meanwhile: with ``-s`` the rank's, with ``--setup-show`` its pytest's."""
    next_test: NextTest = NextTest()
    store_prefix: str = ""
    """Of this rank set's names on the launcher's store; empty if it has a store of its own."""
    slots: tuple[Path, ...] = ()
    """Files of the slots, which the server locks while the ranks live."""
    terminal: tuple[int, ...] = ()
    """Descriptors of the session's standard input, output and error; empty if it has none."""
    foreground: int = 0
    """The session's process group, which has the terminal while no debugger runs."""
    debugged_rank: int = 0
    gpus: tuple[str, ...] = ()
    """By the names of the caller's visible list; empty leaves the list as it is."""

    def log_path(self, rank: int, stream: str) -> Path:
        """Where a rank's ``stdout`` or ``stderr`` goes, or the ``terminal`` of its pytest."""
        return self.directory / f"rank{rank}.{stream}"

    def stacks_path(self, rank: int) -> Path:
        """Where a rank writes its stacks when asked."""
        return self.directory / f"rank{rank}.stacks"
