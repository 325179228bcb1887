"""What a rule is: a code, a level, a cure, and a function that looks for cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Generic, TypeVar

from pytest_fsdp_comm.text.fqn import natural_key
from pytest_fsdp_comm.tree.finding import Finding, Level
from pytest_fsdp_comm.tree.findings.thresholds import Thresholds

_Subject = TypeVar("_Subject")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing that breaks a rule: what differs between its findings."""

    fqns: tuple[str, ...]
    """Of the modules or parameters concerned, in any order."""
    reason: str
    """As in `Finding`."""
    nbytes: int | None = None
    """As in `Finding`."""
    cure: str | None = None
    """What to write instead here; None for the rule's cure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Generic[_Subject]):
    """A sort of finding."""

    code: str
    """A short name, such as ``no-root-unit``."""
    level: Level
    """Unless the project says otherwise. Errors make training wrong or defeat FSDP; warnings cost
    time or memory."""
    cure: str
    """What to write instead."""
    cases: Callable[[_Subject, Thresholds], Iterator[Case]]

    def findings(
        self, subject: _Subject, thresholds: Thresholds, level: Level
    ) -> Iterator[Finding]:
        """What the rule finds, at a level; cases that differ in nothing but names are one."""
        alike: dict[tuple[str, str, int | None], list[Case]] = {}
        for case in self.cases(subject, thresholds):
            cure = self.cure if case.cure is None else case.cure
            alike.setdefault((case.reason, cure, case.nbytes), []).append(case)
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
) -> Callable[[Callable[[_Subject, Thresholds], Iterator[Case]]], Rule[_Subject]]:
    """Makes a `Rule` of a function that yields its cases."""
    return lambda cases: Rule(code=code, level=level, cure=cure, cases=cases)
