"""Makes Hypothesis call a test alike on each rank."""

from __future__ import annotations

import contextlib
import inspect
import random
import sys
import unittest
import zlib
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import pytest

from pytest_fsdp_comm import upstream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# Note [Equal examples]: a collective in an example must meet that of the same example on the other
# ranks. So all ranks draw from one seed, which depends on the state of `random`, which they share;
# a seed of the user's wins. Settings are left out that depend on time (deadline), use files that
# ranks would share (database), or run an example again on the only rank where it failed (the phases
# after the first failure). Even so Hypothesis runs a failed example once more: then the test only
# draws what it drew, and fails in the same way. Private names of Hypothesis 6.170 are used, each of
# which has a test in tests/unit/ranks/test_hypothesis_tests.py.


def align_examples(item: pytest.Item) -> None:
    """Prepare a test that Hypothesis calls; do nothing with others."""
    core: Any = sys.modules.get("hypothesis.core")
    test: Any = getattr(item, "obj", None)
    if core is None or not getattr(test, "is_hypothesis_test", False):
        return
    function = getattr(test, "__func__", test)
    if not hasattr(core, "global_force_seed"):
        raise upstream.moved_error(
            "hypothesis",
            "core.global_force_seed",
            "equal examples on all ranks rely on",
            remedy="draw the same examples on all ranks with @settings(derandomize=True)",
        )
    if core.global_force_seed is None:
        core.global_force_seed = zlib.crc32(repr(random.getstate()).encode())
    _ignore_local_constants()
    handle = getattr(function, "hypothesis", None)
    if handle is None:
        return  # a state machine, which has no function that could be wrapped
    from hypothesis import Phase, settings  # noqa: PLC0415  # loaded already

    given: Any = getattr(function, "_hypothesis_internal_use_settings", settings.default)
    function._hypothesis_internal_use_settings = settings(
        parent=given,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[phase for phase in given.phases if phase in {Phase.explicit, Phase.generate}],
    )
    handle.inner_test = _raising_its_first_failure(
        handle.inner_test,
        "fsdp-comm: all ranks had the same examples. This one is not shrunk, since its rank would "
        "be alone with it; @hypothesis.seed(N) or --hypothesis-seed=N draws the same ones again, "
        f"with N = {core.global_force_seed}",
    )


def _ignore_local_constants() -> None:
    """Keep Hypothesis from trying constants of modules that only some ranks have imported."""
    name = "hypothesis.internal.conjecture.providers"
    providers: Any = sys.modules.get(name)
    found = getattr(providers, "_local_constants", None)
    if found is not None:  # not in older versions
        none = type(found)()
        providers._get_local_constants = lambda: none
        providers.CONSTANTS_CACHE.cache.clear()


def _raising_its_first_failure(test: Callable[..., Any], hint: str) -> Callable[..., Any]:
    """A test that raises its first failure again and again; see Note [Equal examples]."""
    from hypothesis.errors import HypothesisException  # noqa: PLC0415  # loaded already

    failures: list[BaseException] = []
    # What the last example drew within the test: from which of its `data()` arguments, and how.
    drawn: list[tuple[int, tuple[Any, ...], dict[str, Any]]] = []

    def noted_draw(number: int, source: Any, *args: Any, **kwargs: Any) -> Any:
        drawn.append((number, args, kwargs))
        return type(source).draw(source, *args, **kwargs)

    @contextlib.contextmanager
    def watched(arguments: Iterable[Any]) -> Iterator[None]:
        __tracebackhide__ = True
        sources = [given for given in arguments if type(given).__name__ == "DataObject"]
        if failures:
            for number, args, kwargs in drawn:
                type(sources[number]).draw(sources[number], *args, **kwargs)
            raise failures[0]
        drawn.clear()
        for number, source in enumerate(sources):
            source.draw = partial(noted_draw, number, source)
        try:
            yield
        except (Exception, pytest.fail.Exception) as error:
            # Neither what steers Hypothesis, nor a skip.
            if not isinstance(error, (HypothesisException, unittest.SkipTest)):
                error.add_note(hint)
                failures.append(error)
            raise

    @wraps(test)
    def call(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with watched((*args, *kwargs.values())):
            return test(*args, **kwargs)

    @wraps(test)
    async def call_async(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        with watched((*args, *kwargs.values())):
            return await test(*args, **kwargs)

    return call_async if inspect.iscoroutinefunction(test) else call
