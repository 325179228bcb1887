"""What a rule is: a code, a level, a cure, and a function that looks for cases."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.tree.finding import Finding, Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Case(NamedTuple):
    """One thing that breaks a rule: what differs between the rule's findings."""

    fqns: tuple[str, ...]
    """The modules or parameters concerned, in any order."""
    reason: str
    nbytes: int | None = None
    """As in `Finding`."""
    cure: str = ""
    """What to write instead here; empty for the rule's cure."""


class Rule(NamedTuple):
    """A sort of finding."""

    code: str
    """A short name, such as ``no-root-unit``."""
    level: Level
    """The default. Errors make training wrong or defeat FSDP; warnings cost time or memory."""
    cure: str
    """What to write instead."""
    cases: Callable[[Any], Iterator[Case]]
    """Yields what breaks the rule: in a `Wrapping`, or in texts of ranks."""

    def findings(self, subject: object, level: Level) -> Iterator[Finding]:
        """Yield a finding for each group of cases that differ in nothing but names."""
        alike: dict[tuple[str, str, int | None], list[Case]] = {}
        for case in self.cases(subject):
            key = (case.reason, case.cure or self.cure, case.nbytes)
            alike.setdefault(key, []).append(case)
        for (reason, cure, nbytes), cases in alike.items():
            fqns = chain.from_iterable(case.fqns for case in cases)
            yield Finding(
                code=self.code,
                level=level,
                fqns=tuple(sorted(fqns, key=natural_key)),
                reason=reason,
                cure=cure,
                nbytes=None if nbytes is None else nbytes * len(cases),
                count=len(cases),
            )


def rule(
    code: str, level: Level, *, cure: str
) -> Callable[[Callable[[Any], Iterator[Case]]], Rule]:
    """Make a `Rule` of a function that yields its cases."""
    return lambda cases: Rule(code, level, cure, cases)
