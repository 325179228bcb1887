"""Calculate the sizes that the examples expect in their recordings."""

from __future__ import annotations

import math

BF16, FLOAT = 2, 4


def padded(ranks, *shapes):
    """Count the elements that a unit gathers; FSDP pads first dimensions to a multiple of ranks."""
    return sum(math.ceil(rows / ranks) * ranks * math.prod(row) for rows, *row in shapes)
