"""Follow callbacks of futures, which run on whatever thread completes the future."""

# Note [Callbacks of futures]
# DDP's communication hooks chain collectives in Future.then (PowerSGD does). Whether such a
# callback runs at once or later on a thread of the backend is a race, so both must be recorded,
# and attributed alike: to what registered the callback.

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

from pytest_fsdp_comm import upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from pytest_fsdp_comm.recording.owners.attribution import Attribution


@contextlib.contextmanager
def following_callbacks(
    attribute: Callable[[], Attribution],
    resumed: Callable[[Attribution], AbstractContextManager[None]],
) -> Iterator[None]:
    """Run each callback in `resumed`, with the attribution of the code that registers it."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(future: Any, callback: Callable[..., Any]) -> Any:
            registered = attribute()

            @functools.wraps(callback)
            def run(*args: Any) -> Any:
                with resumed(registered):
                    return callback(*args)

            return original(future, run)

        return wrapped

    # The base, since work.get_future() gives a plain one. Read in torch 2.6 to 2.15.
    future_type = upstream.look_up(
        "torch", "torch._C", "Future", "the recorder relies on to follow callbacks"
    )
    with contextlib.ExitStack() as undo:
        for name in ("then", "add_done_callback"):
            original = getattr(future_type, name)
            setattr(future_type, name, wrap(original))
            undo.callback(setattr, future_type, name, original)
        yield
