"""Follows callbacks of futures, which run on whatever thread completes the future.

DDP's communication hooks chain collectives in ``Future.then`` (PowerSGD does). Whether such a
callback runs at once or later on a thread of the backend is a race, so both have to be recorded,
and to the same place: the one where the callback was registered.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pytest_fsdp_comm.recording.owners.place import Place


@contextlib.contextmanager
def following_callbacks(
    place: Callable[[], Place], resumed: Callable[[Place], AbstractContextManager[None]]
) -> Iterator[None]:
    """Wraps the two ways to register a callback, and puts them back.

    Args:
        place: Tells where the code is that registers a callback.
        resumed: Entered around the callback, on its thread, with that place.
    """

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(future: Any, callback: Callable[..., Any]) -> Any:
            registered = place()

            @functools.wraps(callback)
            def run(*args: Any) -> Any:
                with resumed(registered):
                    return callback(*args)

            return original(future, run)

        return wrapped

    # The base, since work.get_future() gives a plain one. Read in torch 2.6 to 2.15.
    future_type = torch._C.Future  # noqa: SLF001  # see above
    with contextlib.ExitStack() as undo:
        for name in ("then", "add_done_callback"):
            original = getattr(future_type, name)
            setattr(future_type, name, wrap(original))
            undo.callback(setattr, future_type, name, original)
        yield
