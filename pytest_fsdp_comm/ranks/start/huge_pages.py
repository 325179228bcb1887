"""Keeps the memory that ranks are forked with in few pages."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

# Note [Huge pages]: a fork copies the page table, and the end of each process walks through its
# copy: with torch and FSDP2 imported, that is 55,000 pages of 4 KiB, or 110 of 2 MiB. A fork took
# 7.6 ms and 1.4 ms, the end of a forked process that does nothing 9 ms and 3 ms (Linux 6.18). A
# rank that writes to a huge page still copies only the 4 KiB around. What the kernel cannot move
# stays as it is. Moving everything takes as long as huge pages save within about 60 ranks; a
# session that starts fewer should not pay for it, so that the fork server begins after half as
# many, page by page, while nobody waits for it.

_NBYTES = 2 << 20
# linux/mman.h, since Linux 6.1; an older kernel refuses.
_MADV_COLLAPSE = 25


def collapse_memory() -> Iterator[None]:
    """Move this process's private memory into huge pages, one with each step of the iterator."""
    # A step takes about a millisecond, much more on some virtual machines.
    if sys.platform != "linux":
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start, end in _private_memory():
        first = -(-start // _NBYTES) * _NBYTES
        for address in range(first, end - _NBYTES + 1, _NBYTES):
            advise(address, _NBYTES, _MADV_COLLAPSE)
            yield


def _private_memory() -> list[tuple[int, int]]:
    """From where to where the writable memory goes that belongs to no file."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
            # Addresses, permissions, offset, device, inode, and a name if there is one.
            addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
            if permissions == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
                start, _, end = addresses.partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found
