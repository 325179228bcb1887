"""Errors about a name that does not exist: what there is instead, and what was probably meant."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, ParamSpec, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")


def closest(asked: str, known: Iterable[str]) -> str:
    """The known name that is most like another one; empty if none is."""
    import difflib  # noqa: PLC0415  # needed only on the way to an error

    return next(iter(difflib.get_close_matches(asked, known, n=1)), "")


def did_you_mean(meant: str) -> str:
    """The end of an error about a name; empty if nothing is like it."""
    return f"; did you mean {str(meant)!r}?" if meant else ""


class NamedAttributes:
    """Answers for every attribute that is missing with what there is."""

    __slots__ = ()

    _called: ClassVar[str]
    """How a test writes a value of the class."""

    if not TYPE_CHECKING:  # or type checkers take every name for one that exists

        def __getattr__(self, name: str) -> Any:
            """Called where a name is missing."""
            __tracebackhide__ = True
            # What protocols look for, and a property that exists and failed by itself.
            if name.startswith("_") or hasattr(type(self), name):
                return object.__getattribute__(self, name)
            there = [known for known in dir(self) if not known.startswith("_")]
            raise AttributeError(
                f"{self._called} has no attribute {name!r}; it has {', '.join(there)}"
                f"{did_you_mean(closest(name, there))}",
                name=name,
                obj=self,
            )


def shows_usage(
    called: str, *, usage: str = ""
) -> Callable[[Callable[_Given, _Result]], Callable[_Given, _Result]]:
    """Make a call with wrong arguments say how to write `called`: as `usage`, unless empty."""

    def decorate(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
        @functools.wraps(function)
        def call(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
            __tracebackhide__ = True
            try:
                return function(*args, **kwargs)
            # Looked at afterwards, so that a call that is right costs nothing; a TypeError from
            # inside of the function stays as it is.
            except TypeError:
                text = _explain_arguments(called, usage, function, args, kwargs)
                if not text:
                    raise
            raise TypeError(text) from None

        return call

    return decorate


def _explain_arguments(
    called: str, usage: str, method: Callable[..., Any], args: Any, kwargs: dict[str, Any]
) -> str:
    """Say what is wrong with a method's arguments, and what it takes; empty if nothing is."""
    signature = inspect.signature(method)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as problem:
        bare = [
            parameter.replace(annotation=inspect.Parameter.empty)
            for parameter in [*signature.parameters.values()][1:]  # without `self`
        ]
        names = [parameter.name for parameter in bare]
        unknown = next((name for name in kwargs if name not in names), "")
        takes = usage or f"{called}{inspect.Signature(bare)}"
        return f"{called}: {problem}; write {takes}{did_you_mean(closest(unknown, names))}"
    return ""
