"""What ``--comm-artifacts`` keeps of failed comparisons, to look at and accept elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

if TYPE_CHECKING:
    from collections.abc import Sequence

# Note [Kept files]: each directory is laid out like that of the snapshots.
#
#     received/tests/test_step/test_step.ws4.comm   what was recorded
#     expected/tests/test_step/test_step.ws4.comm   what it was compared with; none for a new file
#     stories/tests/test_step/test_step.ws4.txt     how they differ, and the code that sends
#
# The received file is written last: where it is, the others are complete.
RECEIVED: Final = "received"
EXPECTED: Final = "expected"


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifacts:
    """The files that are kept of one comparison (see Note [Kept files])."""

    received: Path
    expected: Path
    story: Path

    @classmethod
    def of(cls, directory: Path, snapshot: Path) -> Self:
        """Where they are, for a snapshot's path relative to the directory of all snapshots."""
        return cls(
            received=directory / RECEIVED / snapshot,
            expected=directory / EXPECTED / snapshot,
            story=directory / "stories" / snapshot.with_suffix(".txt"),
        )

    def keep(self, *, received: str, expected: str | None, story: Sequence[str]) -> None:
        """Replace an earlier run's, or raise OSError; `expected` is None for a new snapshot."""
        text = "\n".join(story) + "\n"
        contents = ((self.story, text), (self.expected, expected), (self.received, received))
        for path, content in contents:
            if content is None:
                path.unlink(missing_ok=True)
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            # All ranks of a test do this at once, with the same content.
            unfinished = path.with_name(f".{path.name[:200]}.{getpid()}")
            try:
                unfinished.write_text(content, encoding="utf-8", newline="\n")
                unfinished.replace(path)
            finally:
                unfinished.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove those of an earlier run, which would bring its state back."""
        for path in (self.received, self.expected, self.story):
            path.unlink(missing_ok=True)
