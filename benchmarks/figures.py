"""Where the benchmarks leave what they measured, for `run.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE: Final = "FSDP_COMM_FIGURES"
"""The environment variable that names the file; without it nothing is kept."""


def keep(name: str, values: Iterable[float], *, most: float | None = None) -> None:
    """Keep values of a figure that were measured in one run.

    Args:
        name: What was measured, and beside what; the same in all runs.
        values: One of each turn; ratios, unless the name says another unit.
        most: What its median may be at most.
    """
    path = os.environ.get(FILE)
    if path:
        line = json.dumps({"name": name, "values": [*values], "most": most})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
