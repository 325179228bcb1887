"""Texts of any length under names, on a TCP store of torch that many machines reach."""

from __future__ import annotations

import contextlib
import datetime as dt
from typing import TYPE_CHECKING

from torch.distributed import (  # type: ignore[attr-defined]  # documented, not in torch's __all__
    DistError,
    PrefixStore,
    Store,
    TCPStore,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pytest_fsdp_comm.ranks.wire.rank_set import StoreAddress

# The store drops a client that sends 8 MiB or more at once (torch 2.13, libuv).
_CHUNK_NBYTES = 4 << 20


class StoreLostError(Exception):
    """The store does not answer: the process that served it is gone."""


@contextlib.contextmanager
def _explaining_loss() -> Iterator[None]:
    try:
        yield
    except DistError as error:
        raise StoreLostError(str(error)) from error


class TextStore:
    """One client of the store; not for use by several threads."""

    def __init__(self, store: Store) -> None:
        """Wrap a client, which is used by this object alone."""
        self._store = store

    def close(self) -> None:
        """Disconnects, and ends the store if this process serves it; those below count, too."""
        # Not left to the collector: a traceback may keep this object alive.
        del self._store

    def below(self, name: str) -> TextStore:
        """The same store with a longer prefix."""
        return TextStore(PrefixStore(name, self._store))

    @_explaining_loss()
    def put(self, name: str, text: str) -> None:
        """Make a whole text visible, in one step for readers."""
        data = text.encode("utf-8", "surrogatepass")
        for offset in range(0, len(data), _CHUNK_NBYTES):
            chunk = data[offset : offset + _CHUNK_NBYTES]
            self._store.set(f"{name}@{offset}", chunk)  # type: ignore[arg-type]  # accepts bytes
        self._store.set(name, str(len(data)))

    @_explaining_loss()
    def has(self, name: str) -> bool:
        """Whether there is a text."""
        return bool(self._store.check([name]))

    @_explaining_loss()
    def get(self, name: str) -> str:
        """A text that is there."""
        data = b"".join(self._store.get(chunk) for chunk in self._chunks(name))
        return data.decode("utf-8", "surrogatepass")

    @_explaining_loss()
    def count(self, name: str, *, add: int = 0) -> int:
        """Add to a number, which begins as 0 and has no text's name; return the sum."""
        return int(self._store.add(name, add))

    @_explaining_loss()
    def remove(self, name: str) -> bool:
        """Remove a text; whether there was one."""
        if not self.has(name):
            return False
        for key in [*self._chunks(name), name]:
            self._store.delete_key(key)
        return True

    def _chunks(self, name: str) -> list[str]:
        nbytes = int(self._store.get(name))
        return [f"{name}@{offset}" for offset in range(0, nbytes, _CHUNK_NBYTES)]


def connect_store(address: StoreAddress, *, timeout_s: float, serves: bool = False) -> PrefixStore:
    """Connect to a store, or serve it until this process ends; `timeout_s` limits every wait.

    Raises:
        StoreLostError: It cannot be reached, or served.
    """
    try:
        client = TCPStore(
            address.host,
            address.port,
            is_master=serves,
            timeout=dt.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except DistError as error:
        raise StoreLostError(str(error).partition("\n")[0]) from error
    return PrefixStore(address.prefix, client)
