"""The random numbers that ranks draw: the same on each, and in each test of kept ranks.

Models, data and sharding are drawn at random in many tests, and have to be the same on all ranks.
A fork copies the states of numpy and torch, but Python makes a new one for each child; spawned and
launched ranks share no state at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pytest_fsdp_comm.ranks.wire.exchange import RankExchange

_LARGEST_SEED = 2**32 - 1  # numpy's


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomStates:
    """The global random states of a process at one moment."""

    python: Any
    """`random.getstate`."""
    numpy: Any
    """``numpy.random.get_state``; None if numpy is not installed."""
    torch: Any
    """``torch.get_rng_state``."""

    @classmethod
    def read(cls) -> RandomStates:
        """The states of this process now."""
        import torch  # noqa: PLC0415  # not in the pytest process

        numpy_random = _numpy_random()
        return cls(
            python=random.getstate(),
            numpy=numpy_random.get_state() if numpy_random else None,
            torch=torch.get_rng_state(),
        )

    def restore(self) -> None:
        """Puts this process into these states."""
        import torch  # noqa: PLC0415  # not in the pytest process

        random.setstate(self.python)
        if self.numpy is not None:
            _numpy_random().set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def digests(self) -> list[str]:
        """What is compared between ranks, of each library."""
        states = (self.python, self.numpy, self.torch.tolist())
        return [hashlib.sha256(repr(state).encode()).hexdigest() for state in states]


def equalize(exchange: RankExchange) -> None:
    """Seeds those libraries alike whose states differ between the ranks of one test.

    What all ranks were seeded with stays.

    Args:
        exchange: Of all ranks, each of which calls this once.
    """
    import torch  # noqa: PLC0415  # not in the pytest process

    digests = [found.split() for found in exchange.share("random", _joined(RandomStates.read()))]
    numpy_random = _numpy_random()
    seeds = (random.seed, numpy_random.seed if numpy_random else None, torch.manual_seed)
    for seed, of_library in zip(seeds, zip(*digests, strict=True), strict=True):
        if seed is not None and len(set(of_library)) > 1:
            seed(int(of_library[0], 16) % _LARGEST_SEED)


def _joined(states: RandomStates) -> str:
    return " ".join(states.digests())


def _numpy_random() -> Any:
    """``numpy.random``, which numpy loads late and then seeds by chance; None without numpy."""
    if "numpy" in sys.modules:
        with contextlib.suppress(ImportError):
            return importlib.import_module("numpy.random")
    return None
