"""The random numbers that ranks draw: the same on each, and in each test of kept ranks."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import random
import sys
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pytest_fsdp_comm.gathering import Exchange

# Note [Equal draws]: models, data and sharding are drawn at random in many tests, and have to be
# the same on all ranks. A fork copies the states of numpy and torch, but Python makes a new one for
# each child, so that a rank gets the one of the pytest process back; spawned and launched ranks
# share no state at all, so that they compare theirs, and seed alike those libraries whose states
# differ. What all ranks were seeded with stays. Kept ranks begin each test with the states of the
# first.

_LARGEST_SEED = 2**32 - 1  # numpy's

_Generator: TypeAlias = "tuple[Callable[[], Any], Callable[[Any], object], Callable[[int], object]]"
"""How to read, restore and seed a library's global generator."""


def _generators() -> tuple[_Generator, _Generator | None, _Generator]:
    """Those of Python, numpy and torch; None if numpy's is not loaded."""
    import torch  # noqa: PLC0415  # not in the pytest process

    numpy: Any = None
    if "numpy" in sys.modules:
        with contextlib.suppress(ImportError):
            numpy = importlib.import_module("numpy.random")
    return (
        (random.getstate, random.setstate, random.seed),
        (numpy.get_state, numpy.set_state, numpy.seed) if numpy else None,
        (torch.get_rng_state, torch.set_rng_state, torch.manual_seed),
    )


def read_states() -> list[Any]:
    """This process's global random states; None for a library that is not loaded."""
    return [generator and generator[0]() for generator in _generators()]


def restore_states(states: Sequence[Any]) -> None:
    """Restore what `read_states` returned."""
    for generator, state in zip(_generators(), states, strict=True):
        if generator is not None and state is not None:
            generator[1](state)


def equalize(exchange: Exchange) -> None:
    """Seed alike the libraries whose states differ between ranks; every rank calls it."""
    # The text of a tensor leaves numbers out.
    own = [state.tolist() if hasattr(state, "tolist") else state for state in read_states()]
    digests = " ".join(hashlib.sha256(repr(state).encode()).hexdigest() for state in own)
    found = [text.split() for text in exchange.share("random", digests)]
    for generator, of_library in zip(_generators(), zip(*found, strict=True), strict=True):
        if generator is not None and len(set(of_library)) > 1:
            generator[2](int(of_library[0], 16) % _LARGEST_SEED)
