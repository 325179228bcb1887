"""How much of what FSDP sends is padding."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from pytest_fsdp_comm.comm.events import Source
from pytest_fsdp_comm.text.nbytes import itemsize

if TYPE_CHECKING:
    from pytest_fsdp_comm.comm.events import Recording


def padding_nbytes(recording: Recording) -> int | None:
    """How many bytes of FSDP's all-gathers and reduce-scatters are no parameter's.

    None if that is not known, as where a unit reduces gradients of some of its parameters only.
    """
    # An unshard says how many bytes of parameters its all-gather carries. What a unit reduces are
    # the gradients of these with the same padding, if they are of as many elements.
    unsharded: defaultdict[str | None, list[int]] = defaultdict(list)
    for reshard in reversed(recording.reshards):
        if reshard.action == "unshard":
            unsharded[reshard.module].append(reshard.nbytes)
    sent = [one for one in recording.collectives if one.source is Source.FSDP]
    numels: defaultdict[tuple[str | None, int, int], set[int]] = defaultdict(set)
    paddings = []
    for one in sorted(sent, key=lambda one: one.kind):  # gathers first
        size = itemsize(one.dtype)
        key = one.owner, one.group_size, one.nbytes // size
        if one.kind == "all_gather" and unsharded[one.owner]:
            nbytes = unsharded[one.owner].pop()
            paddings.append(one.nbytes - nbytes)
            numels[key].add(nbytes // size)
        elif one.kind == "reduce_scatter" and len(numels[key]) == 1:
            paddings.append(one.nbytes - min(numels[key]) * size)
        elif one.kind in {"all_gather", "reduce_scatter"}:
            return None
    # An extension that gathers in a smaller element type sends fewer bytes than it unshards.
    return sum(paddings) if min(paddings, default=0) >= 0 else None
