"""Does in a rank, before its verdict, what plain pytest and Python do when a session ends."""

from __future__ import annotations

import atexit
import gc
import sys
import traceback
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

# Note [End of a rank]: a rank leaves with os._exit, since unwinding would run what its parent
# registered. Without this module, exceptions that only a last garbage collection brings to light,
# and functions registered with atexit, would be lost.

# Plugins of pytest that keep exceptions which nobody can catch, and raise or warn of them at the
# end of each phase.
_KEEPERS = ("unraisableexception", "threadexception")


def raise_lost_exceptions(item: pytest.Item) -> None:
    """Collect garbage, then make pytest raise, or warn of, what finalizers and threads raised."""
    # It takes 0.2 ms after an empty test and 1.3 ms after an FSDP2 step, as what a rank was forked
    # with is frozen (torch 2.13, CPU).
    __tracebackhide__ = True
    gc.collect()
    for name in _KEEPERS:
        keeper: Any = item.config.pluginmanager.get_plugin(name)
        if keeper is not None:
            keeper.pytest_runtest_teardown(item=item)


def forget_exit_functions() -> None:
    """Leave what this process has registered with `atexit` so far to its parent."""
    for finalizer in weakref.finalize._select_for_exit():  # type: ignore[attr-defined]  # no public list
        finalizer.atexit = False
    atexit._clear()  # documented for tests only
    # Registered once a process, by the first finalizer.
    atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]  # see above
    weakref.finalize._dirty = False  # type: ignore[attr-defined]  # see has_exit_functions


def has_exit_functions() -> bool:
    """Whether there is an exit function or finalizer since `forget_exit_functions`."""
    # To find out by running them takes 0.7 ms: it looks at each finalizer that there was before.
    # Private: where it has moved, they are run. `finalize` sets it, to be sorted anew.
    has_finalizers: bool = getattr(weakref.finalize, "_dirty", True)
    return has_finalizers or atexit._ncallbacks() > 1


def run_exit_functions() -> list[str]:
    """Run the exit functions since `forget_exit_functions`; a traceback for each that raised."""
    problems: list[str] = []
    if not has_exit_functions():
        return problems

    def note(raised: sys.UnraisableHookArgs) -> None:
        what = f"{raised.err_msg or 'Exception ignored in'}: {raised.object!r}"
        lines = traceback.format_exception(raised.exc_type, raised.exc_value, raised.exc_traceback)
        problems.append(f"{what}\n\n{''.join(lines)}")

    before, sys.unraisablehook = sys.unraisablehook, note
    try:
        atexit._run_exitfuncs()  # as Python does at its end
    finally:
        sys.unraisablehook = before
    return problems
