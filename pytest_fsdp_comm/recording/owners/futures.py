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
from pytest_fsdp_comm.recording.active import Shared, patched, whose_call

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@Shared
@contextlib.contextmanager
def callbacks() -> Iterator[None]:
    """Run each callback with the attribution of the code that registers it."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def wrapped(future: Any, callback: Callable[..., Any]) -> Any:
            recorders, _ = whose_call()
            registered = [(recorder, recorder.attribute_callback()) for recorder in recorders]

            @functools.wraps(callback)
            def run(*args: Any) -> Any:
                with contextlib.ExitStack() as resumed:
                    for recorder, attribution in registered:
                        resumed.enter_context(recorder.resumed(attribution))
                    return callback(*args)

            return original(future, run)

        return wrapped

    # The base, since work.get_future() gives a plain one. Read in torch 2.6 to 2.15.
    future_type = upstream.look_up(
        "torch", "torch._C", "Future", "the recorder relies on to follow callbacks"
    )
    names = ("then", "add_done_callback")
    with patched(*((future_type, name, wrap(getattr(future_type, name))) for name in names)):
        yield
