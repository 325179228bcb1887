"""Pass the values that a benchmark measured to `run.py`."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE: Final = "FSDP_COMM_FIGURES"
"""Environment variable with the path of the file; if it is unset, nothing is written."""


def keep(name: str, values: Iterable[float], *, most: float | None = None) -> None:
    """Append the values of one figure to the file that `run.py` reads.

    Args:
        name: Identifies the figure; figures of one table share the text before a colon.
        values: One for each turn: ratios, unless the name has a unit.
        most: The limit of the median.
    """
    path = os.environ.get(FILE)
    if path:
        line = json.dumps({"name": name, "values": [*values], "most": most})
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
