"""Pass measurements of the benchmarks to `run.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE: Final = "FSDP_COMM_FIGURES"
"""The environment variable with the file to write; without it, nothing is written."""


def keep(name: str, values: Iterable[float], *, most: float | None = None) -> None:
    """Write the values that one run measured of a figure.

    Args:
        name: The same in all runs; figures of one table share the part before a colon.
        values: One for each turn; ratios, unless the name has a unit.
        most: The limit of the median.
    """
    path = os.environ.get(FILE)
    if path:
        line = json.dumps({"name": name, "values": [*values], "most": most})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
