"""Follow the threads that are started while a recording runs."""

# Note [Threads of a block]
# A dispatch mode watches the thread that entered it and the autograd threads that this one starts,
# so each new thread enters one of its own.

from __future__ import annotations

import contextlib
import functools
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager


@contextlib.contextmanager
def following_threads(watched: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Run each thread that starts in `watched`: see Note [Threads of a block]."""
    original = threading.Thread.start

    # Executors and timers start by it too.
    @functools.wraps(original)
    def start(thread: threading.Thread) -> None:
        # Of this thread alone, so that a class with its own `run` is followed too.
        own, run = vars(thread).get("run"), thread.run

        def restore() -> None:
            # Without which the thread would hold itself alive.
            if own is None:
                vars(thread).pop("run", None)
            else:
                thread.run = own  # type: ignore[method-assign]  # see above

        @functools.wraps(run)
        def watched_run() -> None:
            restore()
            with watched():
                run()

        thread.run = watched_run  # type: ignore[method-assign]  # see above
        try:
            original(thread)
        except BaseException:  # such as one that is started twice
            restore()
            raise

    threading.Thread.start = start  # type: ignore[method-assign, assignment]  # put back below
    try:
        yield
    finally:
        threading.Thread.start = original  # type: ignore[method-assign]  # see above
