"""The recordings under way in this process, and what is patched for their time."""

# Note [Active recordings]
# A patch or a kernel is the process's, not a recording's: with one each, recordings that overlap
# would lose events, or put each other's patches back. So each is made when the first recording
# that needs it begins and undone when the last one ends, and looks up at each call whom it serves.
# That is kept with torch's thread-local state, which the autograd engine takes along to the threads
# of its devices, where an ordinary thread-local value would be missing.

# Note [Whose call]
# Every recording has what any thread sends while it is under way, but what a thread sends that has
# not entered it serves no module: the units and graphs that it knows are its own thread's. A thread
# that was started during recordings is left to these, so that one that outlives its block sends
# nothing in a later one; that this saw it is a gap.

from __future__ import annotations

import contextlib
import functools
import threading
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

from pytest_fsdp_comm import upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from types import CodeType

Recorder = Any
"""`recorder.Recorder`, which is above what calls it."""

_KEY: Final = "pytest_fsdp_comm.recordings"
_STARTED_IN: Final = "_fsdp_comm_recordings"
"""The attribute of a thread with the numbers of the recordings during which it was started."""

_lock = threading.RLock()
_recorders: tuple[Recorder, ...] = ()


def _tls(name: str) -> Any:
    return upstream.look_up("torch", "torch._C", name, "the recorder relies on to find its threads")


# Read in torch 2.6 to 2.15.
_is_stashed: Callable[[str], bool] = _tls("_is_key_in_tls")
_stashed: Callable[[str], tuple[Recorder, ...]] = _tls("_get_obj_in_tls")
_stash: Callable[[str, tuple[Recorder, ...]], None] = _tls("_stash_obj_in_tls")


ENTERED: Final[dict[int, tuple[Recorder, ...]]] = {}
"""As torch's, by thread: asked a thousand times a step, where each call counts."""


def entered() -> tuple[Recorder, ...]:
    """The recordings that this thread entered, or the one whose backward it runs; oldest first."""
    found = ENTERED.get(threading.get_ident())
    if found is not None:
        return found
    return _stashed(_KEY) if _is_stashed(_KEY) else ()


def _enter(recorders: tuple[Recorder, ...]) -> None:
    ENTERED[threading.get_ident()] = recorders
    _stash(_KEY, recorders)
    if not recorders:
        del ENTERED[threading.get_ident()]


@contextlib.contextmanager
def under_way(recorder: Recorder) -> Iterator[None]:
    """Make a recording one of this thread's, and of the process's, while the block runs."""
    global _recorders  # noqa: PLW0603  # what torch patches for the process has one list of users
    with _lock:
        _recorders = (*_recorders, recorder)
    # What another thread has left is still torch's here.
    _enter((*(other for other in entered() if other in _recorders), recorder))
    thread = threading.get_ident()
    try:
        yield
    finally:
        left = tuple(other for other in ENTERED.get(thread, ()) if other is not recorder)
        if thread == threading.get_ident():
            _enter(left)
        else:  # a generator may be resumed, and a fixture torn down, elsewhere
            ENTERED[thread] = left
        with _lock:
            _recorders = tuple(other for other in _recorders if other is not recorder)


def whose_call() -> tuple[tuple[Recorder, ...], tuple[Recorder, ...]]:
    """Who records what this thread sends now, and who only learns that it did.

    See Note [Whose call].
    """
    if entered():
        return _recorders, ()
    started_in = getattr(_python_thread(), _STARTED_IN, None)
    if started_in is None:
        return _recorders, ()
    recording = tuple(recorder for recorder in _recorders if recorder.number in started_in)
    return recording, tuple(other for other in _recorders if other not in recording)


def _python_thread() -> threading.Thread | None:
    # Not threading.current_thread(), which makes a record of each thread of C++ that it sees.
    own = threading.get_ident()
    return next((thread for thread in threading.enumerate() if thread.ident == own), None)


# Note [Not compiled]
# In a function that torch.compile cannot take as a whole, the compiler looks at each frame that is
# run, ours too. It passes over that of code in torch.nn.modules, and follows it from code that it
# compiles, so that is where functions say that they come from which torch calls in place of its
# own; what they call is run without the compiler, as `torch.compiler.disable` does it, which has
# the cost of a context manager.

set_compiler: Callable[[Any], Any] = upstream.look_up(  # read in torch 2.6 to 2.15
    "torch", "torch._C._dynamo.eval_frame", "set_eval_frame", "the recorder relies on to run"
)
"""Set what compiles the frames of this thread, or None for nothing; returns what did."""

_Function = TypeVar("_Function")

OWN_CODES: Final[dict[CodeType, CodeType]] = {}
"""Of functions of the recorder, what is written, and what says that it is torch's."""


def uncompiled(function: _Function) -> _Function:
    """Have the compiler pass over a function. See Note [Not compiled]."""
    own: Any = function
    if own.__code__ not in OWN_CODES:
        # Of no file that is there, so that a traceback does not show a line of it.
        path = f"{TORCH_FILES}nn/modules/pytest_fsdp_comm.py"
        OWN_CODES[own.__code__] = own.__code__.replace(co_filename=path)
    own.__code__ = OWN_CODES[own.__code__]
    return function


TORCH_FILES: Final = f"{Path(torch.__file__).parent}/"
"""How the paths of torch's own files begin."""


class Shared:
    """A patch of the process, there while a recording needs it. See Note [Active recordings]."""

    def __init__(
        self,
        patched: Callable[[], AbstractContextManager[object]],
        *,
        may_end: Callable[[], bool] = lambda: True,
    ) -> None:
        """Prepare to enter `patched` for the first recording, and leave it after the last one.

        Where it may not end then, it does after a later recording.
        """
        self._patched = patched
        self._may_end = may_end
        self._num_users = 0
        self._undo = contextlib.ExitStack()
        self.is_there = False
        """Whether the patch is in place."""

    def __enter__(self) -> None:
        """Have the patch in place from now on."""
        with _lock:
            if not self.is_there:
                self._undo.enter_context(self._patched())
                self.is_there = True
            self._num_users += 1

    def __exit__(self, *_: object) -> None:
        """Take it away, if no other recording needs it."""
        with _lock:
            self._num_users -= 1
            if not self._num_users and self._may_end():
                self.is_there = False
                self._undo.close()


@contextlib.contextmanager
def patched(*attributes: tuple[Any, str, Any]) -> Iterator[None]:
    """Have attributes replaced while the block runs: of each its holder, name and replacement."""
    found = []
    try:
        for holder, name, replacement in attributes:
            found.append(vars(holder).get(name))
            setattr(holder, name, replacement)
        yield
    finally:
        for (holder, name, replacement), before in reversed(
            [*zip(attributes, found, strict=False)]
        ):
            # Otherwise somebody else has replaced it since, and calls this one.
            if vars(holder).get(name) is replacement:
                if before is None:  # inherited
                    delattr(holder, name)
                else:
                    setattr(holder, name, before)


# Note [In place]
# To set an attribute of a class has Python forget what it has learned of the class and of all below
# it, and for nn.Module look at each of 400, which took 3 % of a step of eight layers. And what has
# kept a method (FSDPMemTracker, a graph) would pass an attribute by. So where torch's function is
# one of Python without a closure, the function stays and runs other code: that of a function which
# uses nothing but its arguments, since it runs with torch's globals. What it needs is given as the
# keyword-only argument `_fsdp_comm`, first of all a function with torch's own code.
# What somebody else has put around a function of torch may do anything in its place, so that then
# the attribute is set, around that too.


class InPlace:
    """Code that a function of torch runs in place of its own. See Note [In place]."""

    def __init__(self, holder: Any, name: str, around: Any, *given: Any) -> None:
        """Prepare to have the function of that name run the code of `around`, with what is given.

        Of a function that torch has wrapped by `functools.wraps`, it is the innermost one.
        """
        self._attribute = holder, name
        self._found = vars(holder)[name]
        self._function = _function_of_torch(self._found)
        self.is_attribute = self._function is None
        """Whether the attribute is set, and the function runs its own code."""
        if self.is_attribute:
            self._around = _copy(around, {"_fsdp_comm": (self._found, *given)})
            return
        self._around = around
        self._own = {name: getattr(self._function, name) for name in _OF_CODE}
        original = _copy(self._function, self._own["__kwdefaults__"])
        self._needed = {"_fsdp_comm": (original, *given)}

    @property
    def key(self) -> int:
        """Alike for all attributes that have the function, if it can have other code."""
        return id(self if self.is_attribute else self._function)

    @uncompiled
    def put(self) -> None:
        """Have it run the other code from now on, where all is as it was found."""
        holder, name = self._attribute
        if self.is_attribute:
            if vars(holder).get(name) is self._found:
                setattr(holder, name, self._around)
        elif self._function.__code__ is self._own["__code__"]:
            # In this order, since another thread may call it meanwhile.
            self._function.__kwdefaults__ = self._needed
            self._function.__code__ = self._around.__code__
            self._function.__defaults__ = None

    @uncompiled
    def take(self) -> None:
        """Have it run its own code again, where nobody has put anything else there since."""
        holder, name = self._attribute
        if self.is_attribute:
            if vars(holder).get(name) is self._around:
                setattr(holder, name, self._found)
        elif self._function.__code__ is self._around.__code__:
            for name, value in self._own.items():
                setattr(self._function, name, value)


def _function_of_torch(found: Any) -> Any:
    """The function of torch within what torch has put around it; None if it is of another kind."""
    while isinstance(found, FunctionType) and found.__code__.co_filename.startswith(TORCH_FILES):
        if not hasattr(found, "__wrapped__"):
            return None if found.__closure__ else found
        found = found.__wrapped__
    return None


_OF_CODE: Final = ("__defaults__", "__code__", "__kwdefaults__")


def _copy(function: Any, given: dict[str, Any] | None) -> Any:
    """Make a function of the same code, with other values for its keyword-only arguments."""
    made = FunctionType(function.__code__, function.__globals__, function.__name__)
    made.__qualname__, made.__module__ = function.__qualname__, function.__module__
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, given
    return made


@contextlib.contextmanager
def in_place(*functions: InPlace) -> Iterator[None]:
    """Have functions run other code while the block runs."""
    placed: dict[int, InPlace] = {}
    try:
        for one in functions:
            if one.key not in placed:
                placed[one.key] = one
                one.put()
        yield
    finally:
        for one in reversed(placed.values()):
            one.take()


@Shared
@contextlib.contextmanager
def noting_threads() -> Iterator[None]:
    """Note of each thread that starts during which recordings it does."""
    original = threading.Thread.start

    # Executors and timers start by it too.
    @functools.wraps(original)
    def start(thread: threading.Thread) -> None:
        vars(thread)[_STARTED_IN] = frozenset(recorder.number for recorder in _recorders)
        original(thread)

    with patched((threading.Thread, "start", start)):
        yield
